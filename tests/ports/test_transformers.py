"""transformers' torch and Flax models: the mapping is found without help, and what the report says of each pair."""

import pytest
from ports import flax_twins

pytestmark = pytest.mark.timeout(900)

ONE_PASS = {"outputs", "loss", "buffers", "gradients"}
UNTIL = {
    "bert": ("steps", "float32"),
    "bert_masked": ("reduced", "float32"),
    "gpt2": ("reduced", "float32"),
    "llama": ("reduced", "float32"),
    "vit": ("reduced", "float32"),
    "regnet": ("reduced", "float32"),
    # in float32 the reduced rung takes their rounding for a difference: it learns noise on the first shard alone
    "gpt_neo": ("reduced", "float64"),
    "resnet": ("reduced", "float64"),
}


@pytest.mark.parametrize("name", UNTIL)
def test_twins_agree(name) -> None:
    until, dtype = UNTIL[name]
    report = getattr(flax_twins, name)().check(until=until, ranks=2, steps=6, dtype=dtype).assert_ok()
    assert report.rungs[-1].name == until
    assert all(finding.float64 for finding in report.findings if finding.rung in ONE_PASS)


def test_flax_keeps_the_biased_variance_in_its_running_statistics() -> None:
    report = flax_twins.resnet(train=True).check(until="gradients", power=False)
    assert report.first_failure.name == "buffers"
    differing = {finding.name for finding in report.findings if not finding.verdict.ok}
    variances = {tensor.name for tensor in flax_twins.resnet().first.tensors() if tensor.key == "running_var"}
    assert differing == variances


def test_regnet_in_training_is_found_to_normalise_its_layers_by_running_statistics() -> None:
    """FlaxRegNetXLayer and YLayer do not hand `deterministic` on, so only the stem and the shortcuts train."""
    report = flax_twins.regnet(train=True).check(until="gradients", power=False)
    assert report.first_failure.name == "outputs"
    buffers = next(rung for rung in report.rungs if rung.name == "buffers")
    means = {f.name: f.verdict for f in buffers.findings if f.name.endswith("running_mean")}
    agree = {name for name, verdict in means.items() if verdict.ok}
    assert agree == {
        "regnet.embedder.embedder.normalization.running_mean",
        "regnet.encoder.stages.0.layers.0.shortcut.normalization.running_mean",
    }
    assert buffers.worst.name == "regnet.encoder.stages.0.layers.0.layer.0.normalization.running_mean"
