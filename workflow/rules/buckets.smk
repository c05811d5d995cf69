"""Length buckets and what they do to batches.

Inputs: params.json; the receipt of the dataset.
Outputs: buckets.json, receipt.json.
"""


rule buckets:
    """Length buckets and what they do to batches."""
    input:
        params=ancient(f"{STORE}/buckets/{{key}}/params.json"),
        upstream=TARGETS.upstream("buckets", FULL),
    output:
        f"{STORE}/buckets/{{key}}/receipt.json",
    log:
        f"{RESULTS}/logs/buckets/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/buckets/{{key}}.tsv"
    resources:
        compute=1,
    params:
        placement=lambda wildcards: TARGETS.placement("buckets", wildcards),
        run=lambda wildcards: TARGETS.run_name("buckets", wildcards),
    shell:
        "{STAGE} buckets --params {input.params} --store {STORE} --run {params.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
