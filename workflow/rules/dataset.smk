"""Pinned problems, split into disjoint train and test.

Needs nothing but the configuration (and the dataset hub at full scale); promises two parquet files and a manifest with
their checksums. No GPU.
"""


rule dataset:
    output:
        train="<results>/dataset/train.parquet",
        test="<results>/dataset/test.parquet",
        manifest="<results>/dataset/manifest.json",
    log:
        "<results>/logs/dataset.log",
    conda:
        "../../environment.yml"
    params:
        settings=stage_json(SETTINGS, "dataset"),
        folder=subpath(output.manifest, parent=True),
    shell:
        """
        exec python workflow/scripts/dataset.py \
            --settings {params.settings:q} \
            --output-dir {params.folder:q} \
            &> >(tee {log:q} >&2)
        """
