"""Verified copies of what one host made and another needs: one job an artifact and destination host.

Inputs: the receipt of the result. Outputs: ship/<key>/<host>/receipt.json or step_<n>.json, the record that the copy is in
place. `rule all` names no shipment: a result that stands needs none.
"""


rule ship:
    """Ship one result to the host that needs it."""
    input:
        TARGETS.shipment_upstream,
    output:
        f"{STORE}/ship/{{key}}/{{host}}/receipt.json",
    log:
        f"{RESULTS}/logs/ship/{{key}}/{{host}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/ship/{{key}}/{{host}}.tsv"
    retries: 2
    resources:
        transfer=1,
    params:
        shipment=lambda wildcards: TARGETS.shipment(wildcards),
    shell:
        "{SHIP} {output} --store {STORE} --shipment {params.shipment:q} 2> >(tee {log} >&2)"


rule ship_step:
    """Ship the drafter of one checkpoint to the host that judges it."""
    input:
        TARGETS.shipment_upstream,
    output:
        f"{STORE}/ship/{{key}}/{{host}}/step_{{step}}.json",
    log:
        f"{RESULTS}/logs/ship/{{key}}/{{host}}_{{step}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/ship/{{key}}/{{host}}_{{step}}.tsv"
    retries: 2
    resources:
        transfer=1,
    params:
        shipment=lambda wildcards: TARGETS.shipment(wildcards),
    shell:
        "{SHIP} {output} --store {STORE} --shipment {params.shipment:q} 2> >(tee {log} >&2)"
