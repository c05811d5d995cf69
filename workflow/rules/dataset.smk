"""Completions of all sources merged, deduplicated and split.

Inputs: params.json; the receipts of all completions.
Outputs: train.parquet, validation.parquet, dataset.json, ledger.jsonl, receipt.json.
"""


rule dataset:
    """Completions of all sources merged, deduplicated and split."""
    input:
        params=ancient(f"{STORE}/dataset/{{key}}/params.json"),
        upstream=TARGETS.upstream("dataset", FULL),
    output:
        f"{STORE}/dataset/{{key}}/receipt.json",
    log:
        f"{RESULTS}/logs/dataset/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/dataset/{{key}}.tsv"
    resources:
        compute=1,
    params:
        placement=lambda wildcards: TARGETS.placement("dataset", wildcards),
        run=lambda wildcards: TARGETS.run_name("dataset", wildcards),
    shell:
        "{STAGE} dataset --params {input.params} --store {STORE} --run {params.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
