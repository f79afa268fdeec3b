# The GPU image: the same lock as everywhere, and FlashAttention 4. Nothing is compiled for attention.
#
#     docker build --build-arg COMMIT="$(git describe --always --abbrev=40 --match= --dirty=+changes)" -t biphasic .
#     mkdir -p runs data
#     docker run --rm --init --gpus all --ipc=host --ulimit memlock=-1 --stop-timeout 300 --user "$(id -u):$(id -g)" \
#         -v "$PWD/runs:/app/runs" -v "$PWD/data:/app/data" -e BUCKET -e AWS_ACCESS_KEY_ID -e AWS_SECRET_ACCESS_KEY \
#         biphasic recipes/launch/node.sh yamls/210m_biphasic.yaml
#
# BUCKET is where the data is and checkpoints go (yamls/base/paper.yaml); without it, they are in data/ and runs/. `-e NAME`
# takes a variable from your shell, and leaves it unset if it isn't set there. `--user` makes the files in runs/ yours; the
# image's own user has another id than you (rootless Podman: also --userns=keep-id; rootless Docker: --user 0). `docker stop`
# lets the run save, for 300 s. --ipc and --ulimit: NCCL needs shared and locked memory (docs.nvidia.com/deeplearning/nccl,
# Troubleshooting).
#
# Several machines with InfiniBand: also --network=host --device=/dev/infiniband -e NODE_RANK -e NNODES -e MASTER_ADDR. With
# NCCL_DEBUG=INFO, NCCL prints NET/IB where it uses InfiniBand and NET/Socket where it uses TCP. AWS's EFA needs AWS's
# libfabric and NCCL plugin in the image (docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-installer-containers.html).
#
# The locked torch needs an NVIDIA driver of release 580 or newer (CUDA 13). For an older one, name other wheels of torch, as
# uv's --torch-backend takes them: docker build --build-arg TORCH_BACKEND=cu126 --build-arg CUDA=12.6.3 -t biphasic .
ARG CUDA=13.0.1
ARG UBUNTU=24.04
FROM nvidia/cuda:${CUDA}-runtime-ubuntu${UBUNTU}
ARG TORCH_BACKEND=
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
# g++ (and gcc) and the headers: Triton compiles its launchers when they are first used, and on arm64 two packages have no
# wheels.
# libibverbs1 and ibverbs-providers: NCCL loads them for InfiniBand, and uses TCP without them (rdma-core's services belong to
# the host). procps: pkill, for node.sh.
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ libc6-dev \
    libibverbs1 ibverbs-providers procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home biphasic && chmod 1777 /home/biphasic && python3 -m venv /opt/venv
WORKDIR /app
COPY requirements.lock pyproject.toml README.md ./
# Other wheels of torch need other packages of NVIDIA than the lock has, and `sync` installs what is listed only.
RUN pip install --no-cache-dir "$(grep '^uv==' requirements.lock)" \
    && export UV_NO_CACHE=1 VIRTUAL_ENV=/opt/venv \
    && if [ -z "$TORCH_BACKEND" ]; then \
        uv pip sync --compile-bytecode requirements.lock \
        && uv pip install --compile-bytecode --constraints requirements.lock --requirements pyproject.toml --extra all --extra gpu; \
    else \
        grep -vE '^(torch|torchvision|triton|cuda-.*|nvidia-.*)==' requirements.lock >/tmp/others.txt \
        && UV_TORCH_BACKEND=$TORCH_BACKEND uv pip install --compile-bytecode --constraints /tmp/others.txt \
            --requirements /tmp/others.txt --requirements pyproject.toml --extra all; \
    fi
COPY --chown=biphasic:biphasic . .
RUN uv pip install --no-cache --python /opt/venv/bin/python --no-deps --no-build-isolation --editable . \
    && mkdir -p runs data && chown -R biphasic:biphasic /app && chmod -R a+rX /app && chmod 1777 runs data
# Records of runs and model cards name it, since the image has no .git.
ARG COMMIT=
ENV BIPHASIC_COMMIT=$COMMIT
# For any `--user`: one that the image doesn't know has no name and no home, which caches of torch, Triton and the hub need.
ENV HOME=/home/biphasic USER=biphasic LOGNAME=biphasic
USER biphasic
CMD ["composer", "src/main.py", "--help"]
