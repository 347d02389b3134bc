"""The low-precision model, what its rollouts differ by, and the gate that judges the numbers.

Needs the manifests of dataset and model; promises a checkpoint in each number format that rollouts have, the measured
numbers with their figure, and a gate. A config.json that is set (SC_INT8_CONFIG) is used instead of building one.
Measuring succeeds whatever the numbers are, so that they survive; the gate fails when one exceeds its limit. Measuring
uses the GPU where `runtime.device` is cuda.
"""


rule quantise:
    input:
        model="<results>/model/manifest.json",
    output:
        config="<results>/model/{quantised}/config.json",
        manifest="<results>/model/{quantised}/manifest.json",
    log:
        "<results>/logs/quantise/{quantised}.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=lambda wildcards: QuantizationStage.of(SETTINGS, QUANTISED[wildcards.quantised]).to_json(),
        folder=subpath(output.config, parent=True),
    shell:
        """
        exec python workflow/scripts/quantise.py \
            --settings {params.settings:q} \
            --model-manifest {input.model:q} \
            --output-dir {params.folder:q} \
            &> >(tee {log:q} >&2)
        """


rule validate:
    input:
        dataset="<results>/dataset/manifest.json",
        model="<results>/model/manifest.json",
        quantised=quantised(*(resolved(arm) for arm in SETTINGS.run.arms)),
    output:
        numbers="<results>/precision/validation.json",
        figure=figure("precision/validation", "Precision", "Low precision against BF16"),
    log:
        "<results>/logs/validate.log",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=GPU,
    params:
        settings=stage_json(SETTINGS, "validation"),
    shell:
        """
        exec python workflow/scripts/validate.py \
            --settings {params.settings:q} \
            --dataset-manifest {input.dataset:q} \
            --model-manifest {input.model:q} \
            --quantised-config {input.quantised:q} \
            --output {output.numbers:q} \
            &> >(tee {log:q} >&2)
        """


rule gate_precision:
    input:
        numbers="<results>/precision/validation.json",
    output:
        gate="<results>/precision/gate.json",
    log:
        "<results>/logs/gate_precision.log",
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=stage_json(SETTINGS, "precision_gate"),
    shell:
        """
        exec python workflow/scripts/gate.py precision \
            --settings {params.settings:q} \
            --input {input.numbers:q} \
            --output {output.gate:q} \
            &> >(tee {log:q} >&2)
        """
