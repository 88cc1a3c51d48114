"""The tasks by name; what is known of a task without its data is in its file."""

from __future__ import annotations

from sensli_lab.compare.task import Task
from sensli_lab.compare.tasks.code import CODE
from sensli_lab.compare.tasks.images import CIFAR, FASHION, RESNET, VGG
from sensli_lab.compare.tasks.spirals import SPIRALS
from sensli_lab.compare.tasks.teacher import STUDENT, TEACHER
from sensli_lab.compare.tasks.text import TEXT
from sensli_lab.errors import BadComparison
from sensli_lab.paper.reading import unknown_name

TASKS: dict[str, Task] = {
    task.name: task for task in (TEACHER, SPIRALS, FASHION, VGG, RESNET, TEXT, CODE, CIFAR, STUDENT)
}


def find(name: str) -> Task:
    """A task by its name."""
    if name not in TASKS:
        raise BadComparison(f"TASK: {unknown_name('task', name, [*TASKS, 'all', 'long'])}")
    return TASKS[name]
