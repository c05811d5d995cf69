"""`params.json` of every result: the stage's only source of parameters, beside its outputs.

Inputs: the plan. Outputs: params.json. Never overwrites: equal keys have equal content.
"""


# Milliseconds each: on a scheduler they run where Snakemake runs.
localrules:
    params,
    run_params,


rule params:
    """Parameters of one result in the store."""
    output:
        f"{STORE}/{{stage}}/{{key}}/params.json",
    params:
        document=lambda wildcards: TARGETS.params_document(wildcards.stage, wildcards),
    shell:
        "{DFLASH} write-params {output} {params.document:q}"


rule run_params:
    """Parameters of the report of one state of a run."""
    output:
        f"{RESULTS}/runs/{{run}}/{{key}}/params.json",
    params:
        document=lambda wildcards: TARGETS.params_document("report", wildcards),
    shell:
        "{DFLASH} write-params {output} {params.document:q}"
