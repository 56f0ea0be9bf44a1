# worldserve on a CUDA host. Build:  docker build -t worldserve .
# Run:  docker run --gpus all -p 8000:8000 -v /path/to/checkpoint:/checkpoint:ro worldserve
FROM python:3.12-slim AS builder
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY server server
COPY worldmodel worldmodel
COPY kvcache kvcache
COPY offload offload
COPY clients clients
COPY configs configs
RUN pip install --no-cache-dir -c constraints.txt build hatchling \
 && python -m build --wheel --no-isolation --outdir /wheels

FROM python:3.12-slim AS runtime
# gcc: triton compiles its launchers on the host that runs them.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 worldserve
COPY constraints.txt /constraints.txt
COPY --from=builder /wheels /wheels
RUN python -m venv /opt/worldserve \
 && /opt/worldserve/bin/pip install --no-cache-dir -c /constraints.txt "$(ls /wheels/*.whl)[demo,cuda]" \
 && rm -rf /wheels /constraints.txt
COPY configs /etc/worldserve
ENV PATH=/opt/worldserve/bin:$PATH \
    PYTHONUNBUFFERED=1
USER worldserve
WORKDIR /home/worldserve
EXPOSE 8000
# /healthz answers while the model loads; /readyz tells when sessions may start.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s \
  CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:${WORLDSERVE_SERVER_PORT:-8000}/healthz', timeout=2)"
# exec form: the server is process 1 and gets SIGTERM itself.
ENTRYPOINT ["worldserve"]
CMD ["serve", "/etc/worldserve/lingbot_world_v2.toml", "--host", "0.0.0.0"]
