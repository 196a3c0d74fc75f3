# syntax=docker/dockerfile:1
# Two images: `slim` holds the supervisor alone, for an engine of your own; `vllm` (the default) adds it to a vLLM image.
# Base images are pinned by digest, which the build must be given; docs/deploy-kubernetes.md has the commands.
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm
ARG PYTHON_DIGEST
ARG VLLM_IMAGE=docker.io/vllm/vllm-openai
ARG VLLM_DIGEST

FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY supervisor supervisor
COPY engine engine
COPY kernels kernels
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST} AS slim
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m venv /opt/stallwatch \
    && /opt/stallwatch/bin/python -m pip install --no-cache-dir /wheels/*.whl \
    && install -d -m 0750 -o 10001 -g 10001 /var/lib/stallwatch /var/cache/stallwatch
ENV PATH=/opt/stallwatch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/stallwatch \
    STALLWATCH_SOCKET=/var/lib/stallwatch/control.sock \
    XDG_CACHE_HOME=/var/cache/stallwatch
USER 10001:10001
WORKDIR /var/lib/stallwatch
EXPOSE 8000 9471
# 503 only when something does not pass by itself; half an hour for a model to load is no failure. Orchestrators with
# probes of their own do not look at it.
HEALTHCHECK --start-period=30m --interval=30s --timeout=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9471/healthz', timeout=4)"]
# Process 1 itself: it takes orphans over, reaps them, and hands a SIGTERM on in order. No init is needed.
ENTRYPOINT ["stallwatch"]
CMD ["serve", "-c", "/etc/stallwatch/stallwatch.toml"]

FROM ${VLLM_IMAGE}@${VLLM_DIGEST} AS vllm
USER 0:0
# Beside vLLM, in its own environment: every requirement of ours is a lower bound that vLLM's pins fulfil, and what is
# installed is kept as it is.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip freeze --exclude-editable > /tmp/kept.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/kept.txt /wheels/*.whl \
    && rm /tmp/kept.txt \
    && install -d -m 0750 -o 10001 -g 10001 /var/lib/stallwatch /var/cache/stallwatch
ENV PYTHONUNBUFFERED=1 \
    HOME=/var/lib/stallwatch \
    STALLWATCH_SOCKET=/var/lib/stallwatch/control.sock \
    XDG_CACHE_HOME=/var/cache/stallwatch \
    HF_HOME=/var/cache/stallwatch/huggingface
USER 10001:10001
WORKDIR /var/lib/stallwatch
EXPOSE 8000 9471
HEALTHCHECK --start-period=30m --interval=30s --timeout=5s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9471/healthz', timeout=4)"]
ENTRYPOINT ["stallwatch"]
CMD ["serve", "-c", "/etc/stallwatch/stallwatch.toml"]
