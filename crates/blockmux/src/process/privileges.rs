//! Drops privileges once everything is open: capabilities, and the ability to gain new ones through
//! execve(2).
//!
//! Capabilities belong to a thread, and a new thread inherits those of its parent. So the main
//! thread drops its capabilities before it starts the cores. The threads that exist by then, for
//! logs, signals, probes, populating memory and clusters, drop theirs when they start. A thread
//! that attaches disks keeps what it needs for that ([`PrivilegedThread`]), and so do the commands
//! of the cores that serve them ([`leave_to_commands`]).

use crate::failure::Failure;
use blockmux_engine::core::reactor::EngineCore;
use blockmux_engine::sys;
use blockmux_engine::sys::syscall_filter::deny_unused;
use blockmux_engine::volume::state;
use rustix::fs::{AtFlags, CWD, chownat};
use rustix::io;
use rustix::process::{DumpableBehavior, Gid, Uid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, configure_capability_in_ambient_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs,
};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use tracing::{debug, info};

/// Drops all capabilities of this thread except `needed`, also once more with fewer. Without
/// CAP_DAC_OVERRIDE root can open only files whose permissions allow it, which also applies to
/// volumes that are added later.
///
/// # Errors
/// If the system does not permit it.
pub(crate) fn drop_capabilities(needed: CapabilitySet) -> Result<(), Failure> {
    let dropped = keep(needed).map_err(|error| {
        Failure::run(format!("cannot drop capabilities: {error}; start the daemon with --keep-privileges"))
    })?;
    *DROPPED.lock().unwrap_or_else(PoisonError::into_inner) |= dropped;
    Ok(())
}

/// Keeps CAP_SYS_ADMIN of a core for its commands to drivers only: the kernel looks for partitions
/// on a disk if those who serve it have that capability when they begin.
///
/// # Errors
/// If the system does not permit it.
pub(crate) fn leave_to_commands(core: &EngineCore) -> std::io::Result<()> {
    core.keep_credentials()?;
    keep(!CapabilitySet::SYS_ADMIN)?;
    Ok(())
}

/// Denies all threads the system calls that a serving daemon never makes. A kernel without such
/// filters only makes the process less confined.
pub(crate) fn deny_system_calls() {
    if let Err(error) = deny_unused() {
        info!("unused system calls are not denied: {error}");
    }
}

/// Whether this process has dropped a capability, which it can regain only by a restart.
pub(crate) fn has_dropped(capability: CapabilitySet) -> bool {
    DROPPED.lock().unwrap_or_else(PoisonError::into_inner).contains(capability)
}

/// Whether this thread has a capability.
pub(crate) fn has_capability(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|own| own.effective.contains(capability))
}

/// The user that a daemon runs as once everything is open (`--user`).
#[derive(Clone, Debug)]
pub(crate) struct ServiceUser {
    /// The user's name.
    pub(crate) name: String,
    /// The user ID.
    pub(crate) uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl FromStr for ServiceUser {
    type Err = String;

    fn from_str(name: &str) -> Result<ServiceUser, String> {
        let user = uzers::get_user_by_name(name).ok_or_else(|| {
            format!("no user has the name `{name}`; create it with `useradd --system {name}`")
        })?;
        let gid = user.primary_group_id();
        let groups = uzers::get_user_groups(name, gid).unwrap_or_default();
        let groups = groups.iter().map(uzers::Group::gid).collect();
        Ok(ServiceUser { name: name.to_owned(), uid: user.uid(), gid, groups })
    }
}

impl ServiceUser {
    /// Prepares for [`ServiceUser::switch`]: accepts a state directory of this user, and lets
    /// threads that drop their capabilities keep those for changing the user. The C library changes
    /// the user of all threads, and ends the process if one of them is not permitted to.
    pub(crate) fn prepare(&self) {
        state::set_service_user(self.uid);
        USER_CHANGES.store(true, Ordering::Relaxed);
    }

    /// Switches the process to this user, and makes the user the owner of the state directory, the
    /// state in it and the control socket. The directory may also have the files `served`.
    /// Capabilities stay until [`drop_capabilities`] is called.
    ///
    /// # Errors
    /// If the process does not run as root, or the owner of a file cannot be changed.
    pub(crate) fn switch(
        &self,
        state: Option<&Path>,
        served: &[PathBuf],
        control: Option<&Path>,
    ) -> Result<(), Failure> {
        let cannot = |what: &str, error: io::Errno| {
            Failure::request(format!(
                "--user {}: cannot {what}: {error}; start the daemon as root",
                self.name
            ))
        };
        if let Some(directory) = state {
            state::give_directory(directory, self.uid, self.gid, served)
                .map_err(|error| Failure::request(format!("--user {}: {error}", self.name)))?;
        }
        if let Some(path) = control {
            // Only root can write to the socket's directory.
            let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
            match chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW) {
                Err(error) if error != io::Errno::NOENT => {
                    return Err(cannot(&format!("make it the owner of {}", path.display()), error));
                }
                _ => {}
            }
        }
        set_keep_capabilities(true).map_err(|error| cannot("keep capabilities", error))?;
        sys::become_user(self.uid, self.gid, &self.groups).map_err(|error| {
            let error = io::Errno::from_io_error(&error).unwrap_or(io::Errno::PERM);
            cannot("change the user", error)
        })
    }
}

/// Drops all capabilities of a thread that needs none. A failure is logged only.
pub(crate) fn drop_all_capabilities() {
    drop_all_except(CapabilitySet::empty());
}

/// Drops all capabilities of a thread except to read files of other users, such as the keyring of a
/// cluster. A failure is logged only.
pub(crate) fn keep_only_reading() {
    drop_all_except(CapabilitySet::DAC_READ_SEARCH);
}

/// As long as the user will change, each thread has to be able to.
fn drop_all_except(kept: CapabilitySet) {
    let kept = match USER_CHANGES.load(Ordering::Relaxed) {
        true => kept | CapabilitySet::SETUID | CapabilitySet::SETGID,
        false => kept,
    };
    if let Err(error) = keep(kept) {
        debug!("a thread keeps its capabilities: {error}");
    }
}

/// A thread that keeps some capabilities when the serving threads drop theirs. It starts a thread
/// with these capabilities for each work, and ends when this is dropped.
pub(crate) struct PrivilegedThread(Sender<PrivilegedWork>);

/// Work that needs capabilities.
type PrivilegedWork = Box<dyn FnOnce() + Send>;

impl PrivilegedThread {
    /// Starts the thread, before this one drops its capabilities.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn with(kept: CapabilitySet) -> Result<PrivilegedThread, Failure> {
        let (sender, works) = mpsc::channel::<PrivilegedWork>();
        let run = move || {
            if let Err(error) = keep(kept) {
                debug!("a thread keeps its capabilities: {error}");
            }
            for work in works {
                // Without a thread, whoever waits for the work notices that it has ended.
                let _ = thread::Builder::new().name("privileged".to_owned()).spawn(work);
            }
        };
        let started = thread::Builder::new().name("privileged".to_owned()).spawn(run);
        started.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
        Ok(PrivilegedThread(sender))
    }

    /// Starts a thread that does the work.
    pub(crate) fn start(&self, work: PrivilegedWork) {
        // The other thread does not end before this is dropped.
        let _ = self.0.send(work);
    }
}

/// Whether the process will change its user. Until then, the threads of [`drop_all_capabilities`]
/// keep CAP_SETUID and CAP_SETGID.
static USER_CHANGES: AtomicBool = AtomicBool::new(false);

/// Drops all of this thread's capabilities except `kept`; returns the dropped ones.
fn keep(kept: CapabilitySet) -> io::Result<CapabilitySet> {
    set_no_new_privs(true)?;
    let CapabilitySets { permitted, .. } = capabilities(None)?;
    let left = permitted & kept;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)?;
    Ok(permitted - left)
}

/// Drops all of this thread's capabilities except `kept`, which programs that it starts have, too,
/// whatever the user. A failure is logged only.
pub(crate) fn pass_on_only(kept: CapabilitySet) {
    let pass_on = || {
        keep(kept)?;
        let sets = capabilities(None)?;
        set_capabilities(None, CapabilitySets { inheritable: sets.permitted, ..sets })?;
        let passed_on = sets.permitted.iter();
        passed_on.into_iter().try_for_each(|one| configure_capability_in_ambient_set(one, true))
    };
    if let Err(error) = pass_on() {
        debug!("a process does not pass on its capabilities: {error}");
    }
}

/// Protects secrets in memory: forbids tracing by other processes of the user, and core dumps.
pub(crate) fn hide_memory() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        debug!("the process stays dumpable: {error}");
    }
}

/// The dropped capabilities of the serving threads.
static DROPPED: Mutex<CapabilitySet> = Mutex::new(CapabilitySet::empty());

/// The advice for errors that a dropped capability causes.
pub(crate) const START_WITH_PRIVILEGES: &str = "the daemon dropped the required capability when it started; restart it with --keep-privileges, or with this volume in its config";
