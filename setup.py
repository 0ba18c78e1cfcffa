"""Make the folders of a checkout the subpackages of ``enginesmith``.

Nothing called ``models`` or ``pipeline`` is installed beside a user's own packages of those names.
"""

from setuptools import find_packages, setup

_FOLDERS = ("calibration", "models", "pipeline")

setup(
    packages=[
        "enginesmith",
        *(f"enginesmith.{name}" for name in find_packages(include=[f"{folder}*" for folder in _FOLDERS])),
    ],
    package_dir={"enginesmith": "."},
    package_data={"": ["*.json", "*.yaml", "data/*", "templates/*", "weights/*"]},
)
