"""Checkpoints, one job a scheduled step, chained on the step before.

Inputs: params.json; the receipts of dataset and buckets; the receipt of the step before.
Outputs: receipts/step_<n>.json. The trainer's own files are never outputs of a rule, since Snakemake deletes existing
outputs when a job starts: the job makes sure that the detached trainer of this key lives, and waits for the step.
"""


rule checkpoint_step:
    """Start or attach to the trainer of this key and wait for one checkpoint."""
    input:
        params=ancient(f"{STORE}/train/{{key}}/params.json"),
        upstream=TARGETS.upstream("train", FULL),
    output:
        f"{STORE}/train/{{key}}/receipts/step_{{step}}.json",
    log:
        f"{RESULTS}/logs/train/{{key}}/step_{{step}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/train/{{key}}/step_{{step}}.tsv"
    retries: 2
    params:
        placement=lambda wildcards: TARGETS.placement("train", wildcards),
        run=lambda wildcards: TARGETS.run_name("train", wildcards),
    shell:
        "{STAGE} train --step {wildcards.step} --params {input.params} --store {STORE} --run {params.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
