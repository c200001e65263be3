# One image for every role: `tandem serve`, `tandem worker` and the rest. Any Debian or Ubuntu whose python3 is 3.11 to
# 3.14 will do as base. For a private package index hand in pip's settings: --secret id=pip,src=pip.conf
ARG BASE=docker.io/library/debian:trixie-slim

FROM ${BASE} AS build
RUN apt-get update -q \
 && apt-get install -q -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/tandem
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY app app
RUN --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    /opt/tandem/bin/pip install --quiet --no-cache-dir .

FROM ${BASE}
RUN apt-get update -q \
 && apt-get install -q -y --no-install-recommends ca-certificates libstdc++6 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --create-home tandem \
 && install -d -o tandem -g tandem /var/cache/tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache
USER tandem
WORKDIR /home/tandem
VOLUME /var/cache/tandem
EXPOSE 8080 50052
STOPSIGNAL SIGTERM
# Ready means the model is loaded. A worker, which speaks no HTTP, is checked by its own probe in deploy/compose.yaml.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["tandem"]
CMD ["serve", "--host", "0.0.0.0"]
