"""Every checkpoint judged while training goes on.

Inputs: params.json; the receipts of the checkpoint, of the references under each kernel, and of the dataset (the n-gram
baseline counts its completions). Outputs: step_<n>.json (the receipt), step_<n>/rows.json and its details.
"""


rule evaluate:
    """Judge one checkpoint."""
    input:
        params=ancient(f"{STORE}/evaluate/{{key}}/params.json"),
        upstream=TARGETS.upstream("evaluate", FULL),
    output:
        f"{STORE}/evaluate/{{key}}/step_{{step}}.json",
    log:
        f"{RESULTS}/logs/evaluate/{{key}}/step_{{step}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/evaluate/{{key}}/step_{{step}}.tsv"
    resources:
        eval_gpu=1,
    params:
        placement=lambda wildcards: TARGETS.placement("evaluate", wildcards),
        run=lambda wildcards: TARGETS.run_name("evaluate", wildcards),
    shell:
        "{STAGE} evaluate --step {wildcards.step} --params {input.params} --store {STORE} --run {params.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
