"""The manifest of a run's state and its report.

Inputs: params.json of the report; the receipts of all results of the run.
Outputs: manifest.json; evaluations.csv, report.html, receipt.json.
"""


rule manifest:
    """Every key, receipt and environment of this state of a run, in one file."""
    input:
        params=ancient(f"{RESULTS}/runs/{{run}}/{{key}}/params.json"),
        upstream=TARGETS.manifest_upstream,
    output:
        f"{RESULTS}/runs/{{run}}/{{key}}/manifest.json",
    log:
        f"{RESULTS}/logs/manifest/{{run}}/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/manifest/{{run}}/{{key}}.tsv"
    params:
        source=lambda wildcards: TARGETS.source(wildcards),
    shell:
        "exec {sys.executable} -m dflash write-manifest {input.params} --store {STORE} --source {params.source:q} "
        "2> >(tee {log} >&2)"


rule report:
    """The page and the table of this state of a run."""
    input:
        params=ancient(f"{RESULTS}/runs/{{run}}/{{key}}/params.json"),
        upstream=TARGETS.upstream("report", FULL),
        manifest=TARGETS.report_manifest,
    output:
        f"{RESULTS}/runs/{{run}}/{{key}}/receipt.json",
    log:
        f"{RESULTS}/logs/report/{{run}}/{{key}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/report/{{run}}/{{key}}.tsv"
    params:
        placement=lambda wildcards: TARGETS.placement("report", wildcards),
    shell:
        "{STAGE} report --params {input.params} --store {STORE} --run {wildcards.run:q} "
        "--placement {params.placement:q} 2> >(tee {log} >&2)"
