//! What a change would do to the running config, without doing it.

use super::edits::Edits;
use super::model::Model;
use super::{Reloader, RunningConfig};
use crate::api::ApiError;
use crate::api::plan::PlanReport;
use crate::daemon::check::READ_TIMEOUT;
use crate::daemon::setup::Setup;
use std::sync::Arc;

/// The changes that a new config would make, which comes from `edits` if there are any. It is a
/// query, which waits for no change.
///
/// # Errors
/// If `setup_of` refuses, or a start would refuse the setup.
pub(super) fn planned(
    reloader: &Arc<Reloader>,
    edits: Option<Edits>,
    setup_of: impl FnOnce(&Reloader, &RunningConfig) -> Result<Setup, ApiError> + Send + 'static,
) -> Result<PlanReport, ApiError> {
    let _reading = reloader.begin_reading()?;
    let (config, planner) = (reloader.config.get(), reloader.clone());
    let plan = move || {
        let mut setup = setup_of(&planner, &config)?;
        planner.settle_policy(&config, &mut setup).map_err(ApiError::invalid)?;
        let desired = Model::of(&setup);
        Ok::<_, ApiError>(planner.plan(&config, &setup, &desired, edits.as_ref()).report)
    };
    reloader.blocking.within(READ_TIMEOUT).run("the files that the config names", plan)?
}
