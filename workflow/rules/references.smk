"""The target's own continuations of the evaluation prompts.

Inputs: params.json; the receipt of the dataset when its held-out prompts are used.
Outputs: references.parquet, features-*.safetensors, receipt.json.
"""


rule references:
    """The target's own continuations of the evaluation prompts."""
    input:
        params=ancient(f"{STORE}/references/{{key}}/params.json"),
        upstream=TARGETS.upstream("references", FULL),
    output:
        f"{STORE}/references/{{key}}/receipt.json",
    log:
        f"{RESULTS}/logs/references/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/references/{{key}}.tsv"
    resources:
        compute=1,
        eval_gpu=1,
    params:
        placement=lambda wildcards: TARGETS.placement("references", wildcards),
        run=lambda wildcards: TARGETS.run_name("references", wildcards),
    shell:
        "{STAGE} references --params {input.params} --store {STORE} --run {params.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
