# The GPU image: the same lock as everywhere, and FlashAttention 4. Nothing is compiled for attention.
#
#     docker build -t biphasic .
#     docker run --gpus all --ipc=host -v $PWD/runs:/app/runs biphasic composer src/main.py yamls/210m_biphasic.yaml
#
# The locked torch needs an NVIDIA driver of release 580 or newer (CUDA 13). For an older one, name other wheels of torch, as
# uv's --torch-backend takes them: docker build --build-arg TORCH_BACKEND=cu126 --build-arg CUDA=12.6.3 -t biphasic .
ARG CUDA=13.0.1
ARG UBUNTU=24.04
FROM nvidia/cuda:${CUDA}-runtime-ubuntu${UBUNTU}
ARG TORCH_BACKEND=
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
# gcc and the headers: Triton compiles its launchers when they are first used, and on arm64 two packages have no wheels.
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home biphasic && python3 -m venv /opt/venv
WORKDIR /app
COPY requirements.lock pyproject.toml README.md ./
RUN pip install --no-cache-dir "$(grep '^uv==' requirements.lock)" \
    && export UV_NO_CACHE=1 VIRTUAL_ENV=/opt/venv ${TORCH_BACKEND:+UV_TORCH_BACKEND=$TORCH_BACKEND} \
    && uv pip sync --compile-bytecode requirements.lock \
    && uv pip install --compile-bytecode --constraints requirements.lock --requirements pyproject.toml --extra gpu
COPY --chown=biphasic:biphasic . .
RUN uv pip install --no-cache --python /opt/venv/bin/python --no-deps --no-build-isolation --editable . \
    && mkdir -p runs && chown -R biphasic:biphasic /app
USER biphasic
CMD ["composer", "src/main.py", "--help"]
