# The gateway, from the lock file alone. Nothing in the image is written to at run time: the root file system may be
# read-only, and the ledger lies in the volume /var/lib/detgate.

FROM python:3.13.14-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The builder by its own lock; what it installs stays in this stage.
COPY requirements/build.txt requirements/lock.txt requirements/
RUN pip install --require-hashes --requirement requirements/build.txt \
    && python -m venv --without-pip /opt/detgate \
    && pip --python /opt/detgate/bin/python install --require-hashes --only-binary :all: --requirement requirements/lock.txt
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip --python /opt/detgate/bin/python install --no-deps --no-index /wheels/*.whl

FROM python:3.13.14-slim-bookworm
RUN groupadd --gid 10001 detgate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin detgate \
    && install --directory --owner 10001 --group 10001 /var/lib/detgate
COPY --from=build /opt/detgate /opt/detgate
ENV PATH=/opt/detgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    DETGATE_HOST=0.0.0.0 \
    DETGATE_PORT=8000 \
    DETGATE_LEDGER__PATH=/var/lib/detgate/ledger
USER 10001:10001
WORKDIR /var/lib/detgate
VOLUME /var/lib/detgate
EXPOSE 8000
# Refuses new requests, lets those under way end, exits with 0.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as u; e = os.environ; u.urlopen(f\"http{'s' * ('DETGATE_TLS__CERT' in e)}://127.0.0.1:{e['DETGATE_PORT']}/livez\", timeout=2, context=ssl._create_unverified_context())"]
ENTRYPOINT ["detgate"]
CMD ["serve"]
