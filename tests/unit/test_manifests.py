"""The manifests of docs/kubernetes.md against the published types of Kubernetes and Kubeflow."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
REASON = "no types of Kubeflow: make test-schedulers installs them"
POD, TRAIN_JOB = "IoK8sApiCoreV1PodTemplateSpec", "TrainerV1alpha1TrainJob"


def manifest(kind: str) -> dict[str, Any]:
    """The page's manifest of a kind."""
    blocks = re.findall(r"(?ms)^```yaml\n(.*?)^```", PAGE.read_text())
    (found,) = (each for each in map(yaml.safe_load, blocks) if each["kind"] == kind)
    return dict(found)


def require_known(data: dict[str, Any], name: str) -> None:
    """Require that data has the fields and types of one of kubeflow-trainer-api's models, and no others."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=REASON)
    kept = getattr(models, name).from_dict(data).to_dict()  # raises for a wrong type
    assert kept == data, "a field that the type has not"


def require_fields(data: dict[str, Any], kind: Any) -> None:
    """Require that data has fields of a type of kubeflow-training, without what these contain."""
    known = {kind.attribute_map[name]: kind.openapi_types[name] for name in kind.attribute_map}
    python = {"str": str, "int": int}
    for field, value in data.items():
        assert field in known, (field, kind)
        assert isinstance(value, python.get(known[field], object)), (field, value, kind)


def test_train_job() -> None:
    require_known(manifest("TrainJob"), TRAIN_JOB)


def test_pytorch_job() -> None:
    models = pytest.importorskip("kubeflow.training.models", reason=REASON)
    job = manifest("PyTorchJob")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    require_fields(job, models.KubeflowOrgV1PyTorchJob)
    require_fields(job["spec"], models.KubeflowOrgV1PyTorchJobSpec)
    require_fields(job["spec"]["runPolicy"], models.KubeflowOrgV1RunPolicy)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        require_fields(replica, models.KubeflowOrgV1ReplicaSpec)
        require_known(replica["template"], POD)
