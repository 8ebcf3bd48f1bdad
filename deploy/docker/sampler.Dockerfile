# Samplers, gateways, scorers, evaluations, audits and the dashboard: no torch, no GPU (about 0.8 GB).
#   docker build -f deploy/docker/sampler.Dockerfile -t agentrl-sampler .
#   docker run --rm agentrl-sampler sample --help
# The base image is pinned by its tag; pin it by digest in your registry: --build-arg PYTHON_IMAGE=python@sha256:…
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
WORKDIR /app
COPY requirements requirements
RUN python -m venv /opt/agentrl \
    && /opt/agentrl/bin/pip install --no-cache-dir --requirement requirements/base.txt \
        --requirement requirements/dashboard.txt --requirement requirements/sampler.txt \
        --requirement requirements/math.txt --requirement requirements/plots.txt --constraint requirements/lock.txt
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY src src
RUN /opt/agentrl/bin/pip install --no-cache-dir --no-deps --editable .

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
# Debian removes old versions of a package from its archive, so tini has no version here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
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
    TRANSFORMERS_NO_ADVISORY_WARNINGS=1 \
    HF_HUB_OFFLINE=1 \
    OMP_NUM_THREADS=1
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["tini", "--", "agentrl"]
CMD ["--help"]
