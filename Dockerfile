# The GPU image: CUDA runtime, the same lock as everywhere, flash-attn and liger-kernel on top.
#
#     docker build -t biphasic .
#     docker run --gpus all --ipc=host -v $PWD/runs:/app/runs biphasic composer src/main.py yamls/210m_biphasic.yaml
#
# flash-attn is compiled against the locked torch, which needs nvcc: hence two stages.
ARG CUDA=12.6.3
ARG UBUNTU=22.04

FROM nvidia/cuda:${CUDA}-devel-ubuntu${UBUNTU} AS build
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends \
        python3.11 python3.11-dev python3.11-venv python3-pip build-essential ninja-build git \
    && rm -rf /var/lib/apt/lists/*
RUN python3.11 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY requirements.lock pyproject.toml README.md ./
RUN pip install --no-cache-dir "$(grep '^uv==' requirements.lock)" \
    && uv pip sync --no-cache --compile-bytecode --python /opt/venv/bin/python requirements.lock
ARG MAX_JOBS=8
RUN MAX_JOBS=${MAX_JOBS} uv pip install --no-cache --python /opt/venv/bin/python --no-build-isolation \
        "flash-attn>=2.7" "liger-kernel==0.8.0"

FROM nvidia/cuda:${CUDA}-runtime-ubuntu${UBUNTU}
ENV DEBIAN_FRONTEND=noninteractive
# gcc: Triton compiles its launchers when they are first used.
RUN apt-get update && apt-get install -y --no-install-recommends python3.11 python3.11-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 biphasic
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /app
COPY --chown=biphasic:biphasic . .
RUN uv pip install --no-cache --python /opt/venv/bin/python --no-deps --no-build-isolation --editable . \
    && mkdir -p runs && chown -R biphasic:biphasic /app
USER biphasic
CMD ["composer", "src/main.py", "--help"]
