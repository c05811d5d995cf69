"""The target answers the prompts of one source.

Inputs: params.json; the receipt of its prompts.
Outputs: completions.parquet, ledger.jsonl, receipt.json.
"""


rule completions:
    """The target answers the prompts of one source."""
    input:
        params=ancient(f"{STORE}/completions/{{key}}/params.json"),
        upstream=TARGETS.upstream("completions", FULL),
    output:
        f"{STORE}/completions/{{key}}/receipt.json",
    log:
        f"{RESULTS}/logs/completions/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/completions/{{key}}.tsv"
    resources:
        compute=1,
    params:
        placement=lambda wildcards: TARGETS.placement("completions", wildcards),
        run=lambda wildcards: TARGETS.run_name("completions", wildcards),
    shell:
        "{STAGE} completions --params {input.params} --store {STORE} --run {params.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
