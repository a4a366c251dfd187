//! Persistent reservations across restarts (APTPL): the directory of the state files, and loading
//! the state of a volume.

use crate::failure::Failure;
use crate::process::privileges;
use crate::volume_kinds::open::OpenImage;
use blockmux_engine::volume::rbd::{RadosState, RadosStateError, RbdError, RbdOwnership, RbdVolume};
use blockmux_engine::volume::state::StateFile;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::volume_state::{
    Commit, ReservationImageError, SharedState, StateGeneration, StoredState, VolumeIdentity, VolumeState,
};
use blockmux_volume::Volume;
use rustix::io::Errno;
use rustix::process::geteuid;
use std::env;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The default state directory by the XDG Base Directory Specification; `None` without a home
/// directory. If the home directory belongs to another user, as under `sudo -u` or `setpriv`, it is
/// a directory of this user below [`SHARED_PARENT`].
pub(super) fn default_directory() -> Option<PathBuf> {
    let directory = home_directory()?;
    let user = geteuid();
    if user.is_root() || env::var_os("XDG_STATE_HOME").is_some_and(|path| Path::new(&path).is_absolute()) {
        return Some(directory);
    }
    let home = PathBuf::from(env::var_os("HOME")?);
    let is_own = home.metadata().is_ok_and(|found| found.uid() == user.as_raw());
    if is_own {
        return Some(directory);
    }
    let private = Path::new(SHARED_PARENT).join(format!("blockmux-{}", user.as_raw()));
    warn!(
        "{} is not the home of this user: reservations are kept in {}; choose another directory with --state",
        home.display(),
        private.display()
    );
    Some(private)
}

fn home_directory() -> Option<PathBuf> {
    // The specification says to ignore relative paths.
    let directory = |variable| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let state =
        directory("XDG_STATE_HOME").or_else(|| directory("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("blockmux"))
}

/// Where the reservations of a volume are stored.
pub(super) struct StatePlace<'a> {
    /// The directory of the state files; `None` if there is none, or the volume's data does not
    /// outlive the process.
    pub(super) directory: Option<&'a Path>,
    /// The UUID that the state file is named by.
    pub(super) local: VolumeUuid,
    /// The image of Ceph that is the volume. If this process owns it, its reservations are beside
    /// it.
    pub(super) image: Option<&'a OpenImage>,
    /// This process does not own the image now.
    pub(super) is_standby: bool,
    /// How the daemon from which this process takes over has released the image.
    pub(super) turn: Option<&'a KnownTurn>,
}

/// How the daemon from which a process takes over has released an image that one daemon owns at a
/// time.
#[derive(Clone)]
pub(super) struct KnownTurn {
    /// The generations of the stored reservations, of which one is found if nobody has owned the
    /// image since; none if the daemon was standby.
    pub(super) generations: Vec<u64>,
    /// All reservations, also those that are not stored.
    pub(super) reservations: Vec<u8>,
}

/// Creates the shared state of a volume and loads its reservations.
///
/// # Errors
/// If the reservations cannot be read. The volume is not exported then: it would be open to
/// initiators that a reservation excludes.
pub(super) fn load(
    place: &StatePlace<'_>,
    name: &str,
    volume: Arc<dyn Volume>,
    identity: VolumeIdentity,
) -> Result<Arc<VolumeState>, Failure> {
    let wrong = |what: String| Failure::request(format!("reservations of `{name}`: {what}"));
    match place.image {
        Some(image) if image.is_owned() => {
            let (state, stored) = begin_turn(&image.volume, place, name).map_err(wrong)?;
            let is_standby = stored.is_none();
            let object = state.name();
            let made = owned(image, name, volume, identity, (state, stored));
            let volume_state = made.map_err(|error| wrong(format!("object {object} {error}")))?;
            match place.turn {
                Some(turn) if !is_standby => {
                    let restored = volume_state.restore_reservations(&turn.reservations);
                    restored.map_err(|error| wrong(format!("what the daemon before has sent {error}")))?;
                }
                Some(_) => volume_state.fence_handed_over(),
                None => {}
            }
            return Ok(volume_state);
        }
        Some(image) => check_unowned(&image.volume).map_err(wrong)?,
        None => {}
    }
    let Some(directory) = place.directory else {
        return VolumeState::identified(volume, identity, None).map_err(|error| wrong(error.to_string()));
    };
    let opened = StateFile::open(directory, &place.local.to_string());
    let (file, stored) = opened.map_err(|error| wrong(error.to_string()))?;
    if !stored.image.is_empty() {
        info!("`{name}`: reservations from {}", file.name());
    }
    let path = file.name();
    VolumeState::identified(volume, identity, Some((file, &stored))).map_err(|error| {
        wrong(format!("{path} {error}; move it away to serve the volume without reservations"))
    })
}

/// The reservations beside an image, if this process owns it and serves the volume. A process that
/// takes over from another one serves it only if nobody else has owned the image since: clients may
/// have sent there what is still on its way to this process. If that is not known, the volume is
/// standby, because the other volumes are served.
fn begin_turn(
    image: &RbdVolume,
    place: &StatePlace<'_>,
    name: &str,
) -> Result<(Arc<RadosState>, Option<StoredState>), String> {
    if place.is_standby {
        return Ok((RadosState::unowned(), None));
    }
    let open = || of_image(image, place, name);
    let Some(turn) = place.turn else {
        let (state, found) = open()?;
        let stored = state.begin_turn(found).map_err(|error| error.to_string())?;
        return Ok((state, Some(stored)));
    };
    let store = |state: &Arc<RadosState>, stored| match state.begin_turn(stored) {
        Ok(stored) => Ok(Some(stored)),
        Err(RadosStateError::Stale { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    };
    match continue_turn(open, store, turn) {
        Ok(Some((state, stored))) => return Ok((state, Some(stored))),
        Ok(None) => {
            warn!("`{name}` is standby, because another daemon has served the image during the takeover")
        }
        Err(error) => warn!("`{name}` is standby, because its reservations cannot be continued: {error}"),
    }
    if let Err(error) = image.disown() {
        warn!(
            "`{name}`: the image may not be released, and must be taken then ('ctl activate --take'): {error}"
        );
    }
    Ok((RadosState::unowned(), None))
}

/// Stores the reservations that the daemon before has sent, because what it had not stored would be
/// undone by the next one. `open` finds what is stored, and `store` replaces it; with `None` it was
/// replaced meanwhile, perhaps by the last commit of the daemon before. `None` if another daemon
/// has served the image.
fn continue_turn<S>(
    open: impl Fn() -> Result<(S, StoredState), String>,
    store: impl Fn(&S, StoredState) -> Result<Option<StoredState>, String>,
    turn: &KnownTurn,
) -> Result<Option<(S, StoredState)>, String> {
    let image = VolumeState::stored_image(&turn.reservations);
    let image = image.map_err(|error| format!("what the daemon before has sent {error}"))?;
    for _ in 0..=turn.generations.len() {
        let (state, found) = open()?;
        if !turn.generations.contains(&found.generation.0) {
            return Ok(None);
        }
        if let Some(stored) = store(&state, StoredState { image: image.clone(), ..found })? {
            return Ok(Some((state, stored)));
        }
    }
    Err("what is stored changes again and again".to_owned())
}

/// The state of an image that one process owns at a time, this one now if its reservations are
/// known.
fn owned(
    image: &OpenImage,
    name: &str,
    volume: Arc<dyn Volume>,
    identity: VolumeIdentity,
    (state, stored): (Arc<RadosState>, Option<StoredState>),
) -> Result<Arc<VolumeState>, ReservationImageError> {
    let ownership = RbdOwnership::new(image.volume.clone(), state.clone(), privileges::keep_only_reading);
    let volume_state = VolumeState::owned(volume, identity, ownership.clone(), state, stored.as_ref())?;
    let (lost, text) = (Arc::downgrade(&volume_state), lost_text(name, image.is_of_group()));
    let (refused, refused_text, name) = (lost.clone(), text.clone(), name.to_owned());
    ownership.on_lost(move || {
        if lost.upgrade().is_some_and(|volume_state| volume_state.lose()) {
            warn!("{text}");
        }
    });
    ownership.on_refused(move || {
        if let Err(error) = VolumeState::check_ownership(&refused, || warn!("{refused_text}")) {
            warn!("`{name}`: I/O was refused, and the cluster does not tell who owns the image: {error}");
        }
    });
    Ok(volume_state)
}

fn lost_text(name: &str, is_of_group: bool) -> String {
    let next = match is_of_group {
        true => "the group of gateways decides who serves it next",
        false => "'ctl activate' takes it back",
    };
    format!(
        "`{name}`: another client has taken the image: the volume is standby, and sessions that use it must connect \
         again; {next}"
    )
}

/// The reservations beside an image that this process owns. Those of a state file are moved there,
/// once: what is beside the image counts from then on.
fn of_image(
    image: &RbdVolume,
    place: &StatePlace<'_>,
    name: &str,
) -> Result<(Arc<RadosState>, StoredState), String> {
    let (state, stored) = RadosState::open(image).map_err(|error| error.to_string())?;
    let object = state.name();
    let file = || place.directory.map(|directory| StateFile::open(directory, &place.local.to_string()));
    if let Some(stored) = stored {
        if let Some(Ok((file, local))) = file()
            && !local.image.is_empty()
        {
            let path = file.name();
            if local.generation > stored.generation {
                return Err(format!(
                    "those in {path} are newer than those in Ceph's object {object}; remove one of the two"
                ));
            }
            warn!(
                "`{name}`: reservations in {path} are not used, but those in Ceph's object {object}; remove the file"
            );
        }
        info!("`{name}`: reservations from Ceph's object {object}");
        return Ok((state, stored));
    }
    let Some((file, local)) = file().transpose().map_err(|error| error.to_string())? else {
        return Ok((state, StoredState::default()));
    };
    if local.image.is_empty() {
        return Ok((state, StoredState::default()));
    }
    let path = file.name();
    VolumeState::check_stored(&local).map_err(|error| format!("{path} {error}"))?;
    let generation = state.propose(StateGeneration::default(), &local.image);
    let stored = match wait_for(&*state, generation) {
        Commit::Committed => StoredState { generation, image: local.image },
        // Another daemon was faster, before this one owned the image.
        Commit::Stale(stored) => return Ok((state, stored)),
        Commit::Failed => return Err(format!("they cannot be moved from {path} to Ceph's object {object}")),
    };
    let removed = file.propose(local.generation, &[]);
    if wait_for(&*file, removed) != Commit::Committed {
        warn!("`{name}`: {path} is not used any longer; remove it");
    }
    warn!("`{name}`: reservations were moved from {path} to Ceph's object {object}");
    Ok((state, stored))
}

/// Refuses an image with reservations that this process would not respect, because it does not own
/// the image.
fn check_unowned(image: &RbdVolume) -> Result<(), String> {
    match RadosState::open(image) {
        Ok((state, Some(stored))) if !stored.image.is_empty() => Err(format!(
            "they are in Ceph's object {}; serve the image with exclusive=on, or remove the object with 'rados rm' to \
             forget them",
            state.name()
        )),
        Ok(_) => Ok(()),
        // A user who may use nothing but the image cannot know of any.
        Err(RadosStateError::Rbd { error: RbdError::Call { error, .. }, .. })
            if [Errno::PERM, Errno::ACCESS].map(Errno::raw_os_error).contains(&error.0) =>
        {
            Ok(())
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Waits for the outcome of a proposal; one that takes too long has failed.
fn wait_for(state: &dyn SharedState, proposal: StateGeneration) -> Commit {
    let end = Instant::now() + MOVE_LIMIT;
    loop {
        match state.outcome(proposal) {
            Some(outcome) => return outcome,
            None if Instant::now() >= end => return Commit::Failed,
            None => thread::park_timeout(Duration::from_millis(1)),
        }
    }
}

/// How long the storage of reservations that are moved may take.
const MOVE_LIMIT: Duration = Duration::from_secs(60);
/// A directory in which every user may create directories, and whose content survives a reboot.
const SHARED_PARENT: &str = "/var/tmp";

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// The daemon before has sent a snapshot without registrations.
    fn turn(generations: &[u64]) -> KnownTurn {
        KnownTurn { generations: generations.to_vec(), reservations: vec![0, 0, 0, 1, 1] }
    }

    fn stored(generation: u64, image: &[u8]) -> StoredState {
        StoredState { generation: StateGeneration(generation), image: image.to_vec() }
    }

    /// Continues a turn with generations 7 and 8 over a record that [`continue_turn`] finds as
    /// `found`, and that the commit of `late` replaces before the first one of this process.
    fn go(
        found: StoredState,
        late: Option<StoredState>,
    ) -> (Result<Option<StoredState>, String>, StoredState) {
        let (record, late) = (RefCell::new(found), RefCell::new(late));
        let store = |_: &(), new: StoredState| {
            if let Some(late) = late.take() {
                record.replace(late);
            }
            if record.borrow().generation != new.generation {
                return Ok(None);
            }
            let next = stored(new.generation.0 + 1, &new.image);
            record.replace(next.clone());
            Ok(Some(next))
        };
        let open = || Ok(((), record.borrow().clone()));
        let continued = continue_turn(open, store, &turn(&[7, 8]));
        (continued.map(|continued| continued.map(|(_, stored)| stored)), record.into_inner())
    }

    #[test]
    fn a_takeover_stores_what_it_restores_and_continues_over_the_last_commit_of_the_one_before() {
        let next = stored(8, &[]);
        assert_eq!(go(stored(7, FOUND), None), (Ok(Some(next.clone())), next));
        let next = stored(9, &[]);
        assert_eq!(go(stored(7, FOUND), Some(stored(8, FOUND))), (Ok(Some(next.clone())), next));
    }

    #[test]
    fn a_takeover_serves_nothing_that_another_daemon_has_served_or_that_is_damaged() {
        let other = stored(12, FOUND);
        assert_eq!(go(other.clone(), None), (Ok(None), other.clone()));
        assert_eq!(go(stored(7, FOUND), Some(other.clone())), (Ok(None), other));
        let damaged = KnownTurn { reservations: vec![1], ..turn(&[7]) };
        let continued = continue_turn(|| Ok(((), stored(7, FOUND))), |_, _| Ok(None), &damaged);
        assert!(continued.is_err_and(|error| error.starts_with("what the daemon before has sent")));
    }

    #[test]
    fn who_serves_a_lost_volume_next_is_said() {
        assert!(lost_text("a", false).ends_with("'ctl activate' takes it back"));
        assert!(lost_text("a", true).ends_with("the group of gateways decides who serves it next"));
    }

    const FOUND: &[u8] = b"what was found";
}
