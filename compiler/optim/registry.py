"""The optimizers and learning-rate schedules that a declaration names; a user's own is named by its import path."""

from .contract import OptimizerConfig, ScheduleConfig
from .lr_schedules import ConstantSchedule, CosineSchedule, LinearSchedule, WsdSchedule
from .optimizers import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig, SgdConfig

OPTIMIZERS: tuple[type[OptimizerConfig], ...] = (AdamWConfig, AdafactorConfig, LionConfig, MuonConfig, SgdConfig)
SCHEDULES: tuple[type[ScheduleConfig], ...] = (ConstantSchedule, CosineSchedule, LinearSchedule, WsdSchedule)
