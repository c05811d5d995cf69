"""The manifest of a run's state and its report.

Inputs: params.json of the report; the receipts of all results of the run.
Outputs: manifest.json; evaluations.csv, report.html, receipt.json.
"""


localrules:
    manifest,


rule manifest:
    """Every key, receipt and environment of this state of a run, in one file."""
    input:
        params=ancient(f"{RESULTS}/runs/{{run}}/{{key}}/params.json"),
        upstream=TARGETS.manifest_upstream,
    output:
        report(
            f"{RESULTS}/runs/{{run}}/{{key}}/manifest.json",
            caption="../report/manifest.rst",
            category="{run}",
            labels={"file": "manifest", "state": "{key}"},
        ),
    log:
        f"{RESULTS}/logs/manifest/{{run}}/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/manifest/{{run}}/{{key}}.tsv"
    params:
        source=lambda wildcards: TARGETS.source(wildcards),
    shell:
        "{DFLASH} write-manifest {input.params} --store {STORE} --source {params.source:q} "
        "2> >(tee {log} >&2)"


rule report:
    """The page and the table of this state of a run."""
    input:
        params=ancient(f"{RESULTS}/runs/{{run}}/{{key}}/params.json"),
        upstream=TARGETS.upstream("report", FULL),
        manifest=TARGETS.report_manifest,
    output:
        receipt=f"{RESULTS}/runs/{{run}}/{{key}}/receipt.json",
        page=report(
            f"{RESULTS}/runs/{{run}}/{{key}}/report.html",
            caption="../report/page.rst",
            category="{run}",
            labels={"file": "page", "state": "{key}"},
        ),
        evaluations=report(
            f"{RESULTS}/runs/{{run}}/{{key}}/evaluations.csv",
            caption="../report/evaluations.rst",
            category="{run}",
            labels={"file": "evaluations", "state": "{key}"},
        ),
    log:
        f"{RESULTS}/logs/report/{{run}}/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/report/{{run}}/{{key}}.tsv"
    params:
        placement=lambda wildcards: TARGETS.placement("report", wildcards),
    shell:
        "{STAGE} report --params {input.params} --store {STORE} --run {wildcards.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
