"""The BF16 model: fetched by its pin, or made and warm-started here.

Needs the dataset manifest; promises a manifest that names the weights and their checksums. The weights themselves stay
undeclared: no job depends on a large file. Uses the GPU where `runtime.device` is cuda.
"""


rule model:
    input:
        dataset="<results>/dataset/manifest.json",
    output:
        manifest="<results>/model/manifest.json",
    log:
        "<results>/logs/model.log",
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        gpu=GPU,
    params:
        settings=stage_json(SETTINGS, "model"),
        folder=subpath(output.manifest, parent=True),
    shell:
        """
        exec python workflow/scripts/model.py \
            --settings {params.settings:q} \
            --dataset-manifest {input.dataset:q} \
            --output-dir {params.folder:q}/base \
            --manifest {output.manifest:q} \
            &> >(tee {log:q} >&2)
        """
