"""The manager's policies: when to save, what to keep."""

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.checkpoint_managers import preservation_policy as preservation_policy
from ostraka.compat.orbax.checkpoint_managers import save_decision_policy as save_decision_policy
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import (
    AnyPreservationPolicy as AnyPreservationPolicy,
)
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import BestN as BestN
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import CustomSteps as CustomSteps
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import (
    EveryNSeconds as EveryNSeconds,
)
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import EveryNSteps as EveryNSteps
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import LatestN as LatestN
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import (
    PolicyCheckpointInfo as PolicyCheckpointInfo,
)
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import (
    PreservationContext as PreservationContext,
)
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import (
    PreservationPolicy as PreservationPolicy,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import (
    AnySavePolicy as AnySavePolicy,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import (
    ContinuousCheckpointingPolicy as ContinuousCheckpointingPolicy,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import (
    DecisionContext as DecisionContext,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import (
    FixedIntervalPolicy as FixedIntervalPolicy,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import (
    InitialSavePolicy as InitialSavePolicy,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import (
    PreemptionCheckpointingPolicy as PreemptionCheckpointingPolicy,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import (
    SaveDecisionPolicy as SaveDecisionPolicy,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import (
    SpecificStepsPolicy as SpecificStepsPolicy,
)

__getattr__ = refuse(__name__)
