"""One source of prompts, normalised.

Inputs: params.json; the source file, by digest, through placement.
Outputs: prompts.parquet, receipt.json.
"""


rule prompts:
    """One source of prompts, normalised."""
    input:
        params=ancient(f"{STORE}/prompts/{{key}}/params.json"),
        upstream=TARGETS.upstream("prompts", FULL),
    output:
        f"{STORE}/prompts/{{key}}/receipt.json",
    log:
        f"{RESULTS}/logs/prompts/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/prompts/{{key}}.tsv"
    resources:
        compute=1,
    params:
        placement=lambda wildcards: TARGETS.placement("prompts", wildcards),
        run=lambda wildcards: TARGETS.run_name("prompts", wildcards),
    shell:
        "{STAGE} prompts --params {input.params} --store {STORE} --run {params.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
