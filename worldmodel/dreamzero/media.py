"""What a call gives back: actions in the robot's units, and predicted latents where a client asked for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from worldmodel.adapter import MediaArray
from worldmodel.dreamzero.robot import Robot
from worldmodel.messages import MediaFormat

OUTPUTS = (MediaFormat.ACTIONS, MediaFormat.LATENT)


class RobotMedia:
    """Outputs of one call on the device; brought to the host and denormalised in `to_host`."""

    def __init__(
        self,
        outputs: tuple[MediaFormat, ...],
        robot: Robot,
        raw_state_S: npt.NDArray[np.float64],
        action_NA: Tensor,
        latents_CFYX: Tensor,
    ) -> None:
        self._outputs = outputs
        self._robot = robot
        self._raw_state_S = raw_state_S
        self._action_NA = action_NA
        self._latents_CFYX = latents_CFYX

    def to_host(self) -> tuple[MediaArray, ...]:
        """Wait for the device and return the arrays in the order they were asked for."""
        return tuple(MediaArray(format=output, array=self._array(output)) for output in self._outputs)

    def _array(self, output: MediaFormat) -> npt.NDArray[np.generic]:
        if output is MediaFormat.LATENT:
            return self._latents_CFYX.float().cpu().contiguous().numpy()
        normalized_NA = self._action_NA.float().cpu().numpy()
        return self._robot.absolute_actions(normalized_NA, self._raw_state_S)
