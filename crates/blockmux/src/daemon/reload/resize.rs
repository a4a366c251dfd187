//! Resizes volumes for a new config.

use super::Reloader;
use super::kept_work::{KeptWork, ResizedVolume};
use super::model::{Model, resize_between};
use super::neighbours;
use super::{Plan, RunningConfig};
use crate::api::request::Request;
use crate::api::{ApiError, ErrorCode};
use crate::daemon::blocking_work::Awaited;
use crate::daemon::named_lock::WorkStep;
use crate::data::part::DataPart;
use crate::protocol::policy::Policy;
use blockmux_proto::volume_state::VolumeState;
use blockmux_volume::{Beyond, Resize, ResizeError, Spec, Volume};
use std::sync::Arc;

/// A resize that a command asks for.
#[derive(Clone)]
pub(super) struct AskedResize {
    pub(super) volume: String,
    pub(super) to: Resize,
    /// The new spec with its passwords; `None` if the storage alone has the size.
    pub(super) spec: Option<Spec>,
}

impl Reloader {
    /// Gives a volume the size that its storage has by now, if a command asks for that; returns the
    /// command with this size, which the config gets.
    pub(super) fn with_own_size(
        &self,
        request: &Request,
        kept: &mut KeptWork,
        step: &WorkStep,
    ) -> Result<Request, ApiError> {
        let mut request = request.clone();
        if let Request::Resize { name, size: size @ None, .. } = &mut request
            && let Some(volume_state) = self.state_of(name)
        {
            kept.release_turn();
            step.begin(format!("resizing volume `{name}`"));
            let before = volume_state.volume().info().size;
            let after = volume_state.resize(Resize::Own).map_err(|error| cannot_resize(name, &error))?;
            *size = Some(after.size);
            match kept.resized.0.first_mut() {
                // An earlier attempt has noticed the new size.
                Some(own) => own.after = after,
                None => {
                    let name = name.clone();
                    kept.resized.0.push(ResizedVolume { name, volume_state, before, after, is_own: true });
                }
            }
        }
        Ok(request)
    }

    /// Resizes volumes. If one cannot be resized, the others get their previous size back. No data
    /// is lost by that: the files stay as long as they are. Those that an earlier attempt has
    /// resized are not resized again.
    pub(super) fn resize(
        &self,
        (config, desired, policy): (&RunningConfig, &Model, &Policy),
        (plan, asked): (&Plan, Option<&AskedResize>),
        kept: &mut KeptWork,
        (awaited, step_now): (&Awaited, &WorkStep),
    ) -> Result<(), ApiError> {
        let names = || plan.steps.iter().filter(|(_, step)| step.resizes()).map(|(name, _)| name);
        let both = [(&config.running, Some(&self.policy)), (desired, Some(policy))];
        neighbours::check(names().map(String::as_str), both).map_err(ApiError::from)?;
        let mut earlier = std::mem::take(&mut kept.resized);
        for name in names() {
            let asked = asked.filter(|asked| asked.volume == *name);
            let specs = config.running.volume(name).zip(desired.volume(name));
            let by_config =
                || specs.and_then(|(before, after)| resize_between(&before.entry.spec, &after.entry.spec));
            let to = asked.map(|asked| asked.to).or_else(by_config);
            let Some((to, volume_state)) = to.zip(self.state_of(name)) else { continue };
            let before = volume_state.volume().info().size;
            let is_settled = match to {
                Resize::Bytes { size, .. } => size == before,
                Resize::Own => true,
            };
            let at = kept.resized.0.len();
            if let Some(own) = earlier.take(&volume_state) {
                kept.resized.0.push(own);
                if is_settled {
                    continue;
                }
            }
            if asked.is_none() && to == Resize::grow(before) {
                continue;
            }
            awaited.check()?;
            kept.release_turn();
            step_now.begin(format!("resizing volume `{name}`"));
            if let Resize::Bytes { size, beyond: Beyond::Discard } = to
                && size < before
            {
                check_cut(name, desired, policy, size)?;
                // A path that hangs usually does so here, where nothing has happened.
                volume_state.volume().deleted_file();
                awaited.begin()?;
            }
            let shown = if asked.is_some() { name.clone() } else { format!("volume `{name}`") };
            let after = volume_state.resize(to).map_err(|error| cannot_resize(&shown, &error))?;
            match kept.resized.0.get_mut(at) {
                Some(own) => own.after = after,
                None => {
                    let name = name.clone();
                    kept.resized.0.push(ResizedVolume { name, volume_state, before, after, is_own: false });
                }
            }
        }
        Ok(())
    }

    /// The volume that is served under this name.
    pub(in crate::daemon) fn state_of(&self, name: &str) -> Option<Arc<VolumeState>> {
        self.exports.volume_state(self.exports.find(name)?.0)
    }
}

/// Checks that a volume that becomes shorter takes no data from others in the same file.
fn check_cut(name: &str, desired: &Model, policy: &Policy, size: u64) -> Result<(), ApiError> {
    let Some(own) = desired.volume(name) else { return Ok(()) };
    let Some(cut) = DataPart::cut(&own.entry.spec, &policy.data_of(name), size) else { return Ok(()) };
    let is_in = |other: &str| policy.data_of(other).iter().any(|part| part.overlaps(&cut));
    let others = desired.volumes().iter().map(|other| &*other.name);
    let others: Vec<_> =
        others.filter(|other| *other != name && is_in(other)).map(|other| format!("`{other}`")).collect();
    match others.is_empty() {
        true => Ok(()),
        false => Err(ApiError::from(format!(
            "volume `{name}`: the end of its file would be cut off, which {} use{}, too; remove what should lose its \
             data first",
            others.join(", "),
            if others.len() == 1 { "s" } else { "" },
        ))),
    }
}

/// Checks that a volume can have a size as far as its blocks are concerned.
///
/// # Errors
/// If the size is no positive multiple of them.
pub(super) fn check_blocks(name: &str, size: u64, volume: &dyn Volume) -> Result<(), ApiError> {
    let block = volume.info().logical_block;
    match size > 0 && size.is_multiple_of(block.into()) {
        true => Ok(()),
        false => Err(cannot_resize(name, &ResizeError::BadSize { size, block })),
    }
}

fn cannot_resize(name: &str, error: &ResizeError) -> ApiError {
    let code = match error {
        ResizeError::Fixed
        | ResizeError::ReadOnly
        | ResizeError::NotServed
        | ResizeError::WouldLose { .. } => ErrorCode::Conflict,
        ResizeError::BadSize { .. } | ResizeError::TooLarge { .. } => ErrorCode::Invalid,
        ResizeError::System { .. } => ErrorCode::Failed,
    };
    ApiError::new(code, format!("{name}: {error}"))
}
