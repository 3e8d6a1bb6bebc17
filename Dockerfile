# fednorms for CPUs. Build: docker build -t fednorms .    Run: docker run --rm fednorms list methods
# tests/docs/test_install.py carries out these steps without Docker.

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt uv \
 && uv build --wheel --build-constraints constraints.txt --out-dir /wheels

FROM python:3.11-slim
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
# The CPU build of torch: the default one brings gigabytes of CUDA libraries.
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt uv \
 && uv pip install --system --no-cache --torch-backend cpu --constraints /tmp/constraints.txt \
    "fednorms[zoo,report] @ file://$(ls /wheels/*.whl)" \
 && rm -rf /wheels /tmp/constraints.txt
# Not root; `docker run --user` chooses whose files a run writes. HOME holds only the cache of decoded images.
USER 1000:1000
WORKDIR /fednorms
ENV HOME=/tmp OMP_NUM_THREADS=1
ENTRYPOINT ["fednorms"]
CMD ["--help"]
