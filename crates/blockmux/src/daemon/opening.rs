//! Opens a volume for export: at the start, by `ctl add` and by a reload.

use super::config::VolumeEntry;
use super::identity::{Identified, identify, target_name};
use super::setup::LARGEST;
use super::state::{self, KnownTurn, StatePlace};
use crate::data::claim::{Claim, ClaimPurpose};
use crate::data::key::DataKey;
use crate::data::part::Part;
use crate::failure::Failure;
use crate::process::machine::{machine_id, memory_bytes};
use crate::protocol::policy::Policy;
use crate::protocol::{Carrier, Protocol};
use crate::volume_kinds::open::{self, Access, OpenImage, Opened, Populate, Use};
use blockmux_engine::volume::rbd::MemberClient;
use blockmux_proto::exports::Export;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::volume_state::{VolumeIdentity, VolumeState};
use blockmux_volume::units::human_size;
use blockmux_volume::{Spec, VolumeInfo};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tracing::warn;

/// A volume to export, with its configured or generated name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedVolume {
    pub(super) name: String,
    pub(super) entry: VolumeEntry,
}

/// Opens volumes with the settings of the daemon.
pub(super) struct VolumeOpener {
    /// The protocols that export the volumes.
    pub(super) protocols: Vec<&'static Protocol>,
    /// The volumes can be resized while the daemon runs.
    pub(super) may_grow: bool,
    /// Decides which of the protocols export a volume.
    pub(super) policy: Policy,
    /// State directory; `None` if there is none.
    pub(super) state: Option<PathBuf>,
    /// The volumes of the daemon from which this process takes over.
    pub(super) known: KnownVolumes,
    /// By whose client images of a group are opened before they are owned.
    pub(super) member: Arc<MemberClient>,
}

/// What is known of the volumes of the daemon from which a process takes over, by name.
#[derive(Clone, Default)]
pub(super) struct KnownVolumes {
    /// Their UUIDs, which are used for data from which no UUID can be derived.
    pub(super) uuids: BTreeMap<String, VolumeUuid>,
    /// The images that one daemon owns at a time.
    pub(super) turns: BTreeMap<String, KnownTurn>,
}

impl NamedVolume {
    /// Checks that the protocol can transmit the volume's description.
    pub(super) fn check_description(&self, protocol: &Protocol) -> Result<(), Failure> {
        let NamedVolume { name, entry: VolumeEntry { description, .. } } = self;
        let max = protocol.max_description;
        if description.len() > max || description.contains('\0') {
            return Err(Failure::request(format!(
                "the description of `{name}` is longer than {max} bytes or contains a NUL; shorten it"
            )));
        }
        Ok(())
    }
}

impl VolumeOpener {
    /// Opens a volume and creates its shared state.
    ///
    /// # Errors
    /// If it cannot be opened, or a protocol cannot export it.
    pub(super) fn open(
        &self,
        named: &NamedVolume,
        populate: Populate,
    ) -> Result<(Export, Arc<VolumeState>), Failure> {
        let NamedVolume { name, entry: VolumeEntry { spec, shared, read_only, .. } } = named;
        let (read_only, shared) = (*read_only, *shared);
        let access = if read_only { Access::Read } else { Access::Either };
        let how = Use {
            access,
            connections: 1,
            may_grow: self.may_grow,
            populate,
            state: self.state.as_deref(),
            part: Part::WHOLE,
        };
        // Read before opening, because a RAM volume takes memory.
        let memory = memory_bytes();
        let opened = open::open(spec, how)?;
        let Opened { volume, data, remote, image, .. } = &opened;
        if let Some(image) = image.as_ref().filter(|image| image.is_of_group()) {
            image.volume.open_by(&self.member);
        }
        if spec.ram_bytes() > memory {
            warn!(
                "{spec}: is larger than this machine's memory ({}); the kernel kills processes when memory runs out",
                human_size(memory)
            );
        }
        let info = volume.info();
        if info.size > LARGEST {
            return Err(Failure::request(format!(
                "{spec}: has {} bytes, but clients support at most 2^63 - 1; serve a smaller volume",
                info.size
            )));
        }
        self.check_blocks(named, &info)?;
        self.check_sessions(named)?;
        let local = identify(named, data.as_ref(), &machine_id())?;
        // An image that one machine owns is the same disk on the next one that does.
        let is_owned = image.as_ref().is_some_and(OpenImage::is_owned);
        let Identified { mut uuid, is_lasting } =
            if is_owned { identify(named, data.as_ref(), "")? } else { local };
        if let Some(known) = self.known.uuids.get(name).filter(|_| !is_lasting) {
            uuid = *known;
        }
        let claims = !shared && !read_only && !info.read_only;
        let claim = claims.then(|| Claim::take(name, ClaimPurpose::Export(uuid), remote)).transpose()?;
        if claims && !remote.is_empty() && !is_owned {
            warn!(
                "`{name}` is on another server: if another machine also exports it, reservations and locks are not \
                 shared between the two"
            );
        }
        let turn = self.known.turns.get(name).filter(|_| is_owned);
        let is_standby = own(&opened, named, turn)?;
        let target_name = target_name(named, uuid);
        let disk_number = data.as_ref().and_then(DataKey::disk_number);
        let unit = named.entry.scsi.clone();
        let identity = VolumeIdentity { uuid, unit, target_name, disk_number, claim: Box::new(claim) };
        let directory = self.state.as_deref().filter(|_| local.is_lasting);
        let place = StatePlace { directory, local: local.uuid, image: image.as_ref(), is_standby, turn };
        let volume_state = state::load(&place, name, volume.clone(), identity)?;
        volume_state.limiter().set_limits(named.entry.volume_limits());
        let (name, description) = (name.clone(), named.entry.description.clone());
        Ok((Export { name, description, read_only, volume: volume.clone() }, volume_state))
    }
}

impl VolumeOpener {
    /// Checks that every protocol that exports an image with `exclusive=standby` has sessions. They
    /// end when another daemon serves the image, because what was sent before may be out of date
    /// afterwards.
    pub(super) fn check_sessions(&self, named: &NamedVolume) -> Result<(), Failure> {
        if !is_in_turns(&named.entry.spec) {
            return Ok(());
        }
        let by_default = |protocol: &&&Protocol| self.policy.exports_by_default(protocol, &named.name);
        let mut serving = self.protocols.iter().filter(by_default);
        serving.try_for_each(|protocol| check_sessions(protocol, &named.entry.spec))
    }

    /// Checks that every protocol that exports a volume supports its block size.
    pub(super) fn check_blocks(&self, named: &NamedVolume, info: &VolumeInfo) -> Result<(), Failure> {
        let spec = &named.entry.spec;
        let mut serving =
            self.protocols.iter().filter(|protocol| self.policy.may_serve(protocol, &named.name));
        serving.try_for_each(|protocol| check_blocks(protocol, spec, info))
    }
}

/// Owns an image as its spec says or, if `turn` is known, as the daemon did from which this process
/// takes over. Returns whether another daemon may own it now.
///
/// # Errors
/// If it cannot be owned, and no daemon was active before.
fn own(opened: &Opened, named: &NamedVolume, turn: Option<&KnownTurn>) -> Result<bool, Failure> {
    let (name, spec) = (&named.name, &named.entry.spec);
    let image = opened.image.as_ref();
    let begins = FirstTurn::of(
        image.is_some_and(OpenImage::is_of_group),
        image.is_some_and(OpenImage::is_standby),
        turn.map(|turn| &turn.generations[..]),
    );
    match begins {
        FirstTurn::Standby => Ok(true),
        FirstTurn::AsSpecified => opened.own_now(spec, true).map(|()| false),
        FirstTurn::Continued => {
            // Nobody has decided that a daemon is shut out which has got the image meanwhile.
            let owned = opened.own_now(spec, false);
            if let Err(failure) = &owned {
                warn!("`{name}` is standby, because this process cannot own the image: {failure}");
            }
            Ok(owned.is_err())
        }
    }
}

/// How a process begins to export an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FirstTurn {
    /// It does not own the image.
    Standby,
    /// It owns the image as the spec says, or does not begin.
    AsSpecified,
    /// It continues a turn of the daemon from which it takes over, if it can.
    Continued,
}

impl FirstTurn {
    /// `generations` are those of the daemon from which it takes over, if it does: none if that was
    /// standby.
    fn of(is_of_group: bool, is_standby: bool, generations: Option<&[u64]>) -> FirstTurn {
        match generations {
            // Only the client of the group's member may own it, which opens it later: of another
            // one the group knows nothing, and its fence would not reach it.
            _ if is_of_group => FirstTurn::Standby,
            Some([]) => FirstTurn::Standby,
            Some(_) => FirstTurn::Continued,
            None if is_standby => FirstTurn::Standby,
            None => FirstTurn::AsSpecified,
        }
    }
}

/// Whether daemons serve an image of this spec in turns.
pub(super) fn is_in_turns(spec: &Spec) -> bool {
    let is_standby = |spec: &&Spec| matches!(spec, Spec::Rbd(image) if image.ownership.begins_standby());
    spec.leaves().iter().any(is_standby)
}

fn check_sessions(protocol: &Protocol, spec: &Spec) -> Result<(), Failure> {
    if protocol.carrier != Carrier::Frames {
        return Ok(());
    }
    Err(Failure::request(format!(
        "{spec}: {} has no sessions that could end when another daemon serves the image; leave `{}` out of the \
         volume's `protocols`, or serve the image with exclusive=on",
        protocol.title,
        protocol.key()
    )))
}

fn check_blocks(protocol: &Protocol, spec: &Spec, info: &VolumeInfo) -> Result<(), Failure> {
    let (title, max) = (protocol.title, protocol.max_logical_block);
    if info.logical_block > max {
        return Err(Failure::request(format!(
            "{spec}: has blocks of {} bytes, but {title} supports at most {max}; leave `{}` out of its `protocols`, or \
             serve a volume with smaller blocks",
            info.logical_block,
            protocol.key()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{AOE, NBD};
    use blockmux_volume::spec::NullSpec;
    use std::str::FromStr;

    const NULL: Spec = Spec::Null(NullSpec {
        size: 1,
        blocks: blockmux_volume::BlockSizes { logical: None, physical: None },
    });

    #[test]
    fn long_descriptions_and_large_blocks_are_refused() {
        let named = |description| {
            let entry = VolumeEntry { description, ..VolumeEntry::from_str("a=null:1").unwrap() };
            NamedVolume { name: "a".to_owned(), entry }
        };
        assert!(named("x".repeat(4096)).check_description(&NBD).is_ok());
        for description in ["x".repeat(4097), "a\0b".to_owned()] {
            let failure = named(description).check_description(&NBD).unwrap_err().to_string();
            assert!(failure.starts_with("the description of `a` is longer than 4096 bytes"), "{failure}");
        }
        let info = |logical_block| VolumeInfo { logical_block, ..VolumeInfo::new(1 << 30) };
        assert!(check_blocks(&NBD, &NULL, &info(1 << 16)).is_ok());
        let failure = check_blocks(&NBD, &NULL, &info(1 << 17)).unwrap_err().to_string();
        assert!(failure.starts_with("null:1: has blocks of 131072 bytes"), "{failure}");
    }

    #[test]
    fn a_takeover_continues_a_turn_unless_the_image_is_of_a_group_now() {
        let of = |is_of_group, generations| FirstTurn::of(is_of_group, true, generations);
        assert_eq!(of(false, Some(&[7])), FirstTurn::Continued);
        assert_eq!(of(true, Some(&[7])), FirstTurn::Standby);
        assert_eq!([of(false, Some(&[])), of(false, None), of(true, None)], [FirstTurn::Standby; 3]);
        assert_eq!(FirstTurn::of(false, false, None), FirstTurn::AsSpecified);
        assert_eq!(FirstTurn::of(false, false, Some(&[])), FirstTurn::Standby);
    }

    #[test]
    fn an_image_that_daemons_serve_in_turns_is_not_served_over_aoe() {
        assert!(check_sessions(&NBD, &NULL).is_ok());
        let failure = check_sessions(&AOE, &NULL).unwrap_err().to_string();
        assert!(
            failure.contains("Ethernet has no sessions") && failure.contains("leave `aoe` out"),
            "{failure}"
        );
    }
}
