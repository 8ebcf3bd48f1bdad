# `agentrl serve --engine sglang`: SGLang in a venv of its own, AgentRL without torch in another (about 25 GB).
#   docker build -f deploy/docker/engine.Dockerfile -t agentrl-engine .
# SGLang compiles kernels at run time, so the base image has the CUDA compiler. It is pinned by its tag; pin it by
# digest in your registry: --build-arg CUDA_IMAGE=nvidia/cuda@sha256:…
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3006
FROM ${CUDA_IMAGE}
# The archive of Ubuntu keeps only the newest version of a package, so packages have no version here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini python3 python3-dev python3-venv libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 agentrl \
    && useradd --uid 10001 --gid 10001 --create-home agentrl \
    && install --directory --owner=10001 --group=10001 /data /data/logs /output
# The version that docs/operations.md and deploy/sglang describe.
ARG SGLANG_VERSION=0.5.23
RUN python3 -m venv /opt/sglang \
    && /opt/sglang/bin/pip install --no-cache-dir "sglang[all]==${SGLANG_VERSION}"
WORKDIR /app
COPY requirements requirements
RUN python3 -m venv /opt/agentrl \
    && /opt/agentrl/bin/pip install --no-cache-dir --requirement requirements/base.txt \
        --requirement requirements/dashboard.txt --requirement requirements/sampler.txt --constraint requirements/lock.txt
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY src src
RUN /opt/agentrl/bin/pip install --no-cache-dir --no-deps --editable .
# hadolint ignore=DL3064
ENV PATH=/opt/agentrl/bin:$PATH \
    AGENTRL_SGLANG_VENV=/opt/sglang \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_OFFLINE=1
USER 10001:10001
WORKDIR /data
EXPOSE 30000
# 503 while weights are loaded: an engine is unhealthy only after two minutes of it.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=8 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "agentrl"]
CMD ["serve", "--engine", "sglang", "--host", "0.0.0.0", "--port", "30000", "--help"]
