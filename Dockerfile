# docker build --target light .   reads, compares and diagnoses; no torch
# docker build --target full .    also trains, with SGLang
FROM python:3.11-slim AS light
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[archive,query]" \
    && useradd --create-home areal
USER areal
WORKDIR /home/areal
ENTRYPOINT ["areal-debug"]
CMD ["--help"]

FROM light AS full
USER root
WORKDIR /source
# Triton compiles for the GPU by gcc; git gives records the commit of the code that trained.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --constraint constraints.txt ".[train,archive,query,sglang,ray,lora]"
USER areal
WORKDIR /home/areal
