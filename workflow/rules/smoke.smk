"""Three steps of each arm before the long runs, and the gate that judges them.

Needs the manifests of dataset and model, the arm's quantised model and a passed precision gate; promises the numbers of the
smoke run and a gate. The run uses the GPU where `runtime.device` is cuda.
"""


rule smoke:
    input:
        dataset="<results>/dataset/manifest.json",
        model="<results>/model/manifest.json",
        quantised=lambda wildcards: quantised(resolved(wildcards.arm)),
        precision="<results>/precision/gate.json",
    output:
        run="<results>/smoke/{arm}/run.json",
    log:
        "<results>/logs/smoke/{arm}.log",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=GPU,
    params:
        settings=lambda wildcards: stage_json(resolved(wildcards.arm, smoke=True), "smoke"),
        folder=subpath(output.run, parent=True),
    shell:
        """
        [ -t 2 ] || exec &> >(tee {log:q} >&2)
        exec python workflow/scripts/train.py --smoke \
            --baseline {wildcards.arm:q} \
            --settings {params.settings:q} \
            --dataset-manifest {input.dataset:q} \
            --model-manifest {input.model:q} \
            --quantised-config {input.quantised:q} \
            --parent "$PPID" \
            --run-dir {params.folder:q}
        """


rule gate_smoke:
    input:
        run="<results>/smoke/{arm}/run.json",
    output:
        gate="<results>/smoke/{arm}/gate.json",
    log:
        "<results>/logs/gate_smoke/{arm}.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=lambda wildcards: stage_json(resolved(wildcards.arm), "smoke_gate"),
    shell:
        """
        exec python workflow/scripts/gate.py smoke \
            --settings {params.settings:q} \
            --input {input.run:q} \
            --output {output.gate:q} \
            &> >(tee {log:q} >&2)
        """
