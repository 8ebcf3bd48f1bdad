# The trainer, and the local engine: torch with CUDA (about 9 GB), or for CPUs (about 2 GB):
#   docker build -f deploy/docker/trainer.Dockerfile -t agentrl-trainer .
#   docker build -f deploy/docker/trainer.Dockerfile -t agentrl-trainer:cpu \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# The base image is pinned by its tag; pin it by digest in your registry: --build-arg PYTHON_IMAGE=python@sha256:…
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
# PyPI's torch for Linux on x86-64 brings the CUDA libraries that it needs.
ARG TORCH_INDEX=https://pypi.org/simple
WORKDIR /app
COPY requirements requirements
# The embedded MongoDB stays out: in containers the database is a server of its own.
RUN python -m venv /opt/agentrl \
    && grep '^torch==' requirements/lock.txt > torch.txt \
    && /opt/agentrl/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" --requirement torch.txt \
    && /opt/agentrl/bin/pip install --no-cache-dir --requirement requirements/base.txt \
        --requirement requirements/sampler.txt --requirement requirements/trainer.txt \
        --requirement requirements/dashboard.txt --requirement requirements/math.txt \
        --requirement requirements/plots.txt --constraint requirements/lock.txt
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY src src
RUN /opt/agentrl/bin/pip install --no-cache-dir --no-deps --editable .

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
# Triton compiles its launchers with gcc. Debian removes old versions of a package, so packages have no version here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 agentrl \
    && useradd --uid 10001 --gid 10001 --create-home agentrl \
    && install --directory --owner=10001 --group=10001 /data /data/logs /output
COPY --from=build /opt/agentrl /opt/agentrl
COPY --from=build /app /app
COPY assets /app/assets
# hadolint ignore=DL3064
ENV PATH=/opt/agentrl/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_OFFLINE=1
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["tini", "--", "agentrl"]
CMD ["train", "--help"]
