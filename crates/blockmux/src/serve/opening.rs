//! From a volume's spec to what is served of it, when the daemon starts and while it runs.

use super::setup::LARGEST;
use super::state;
use crate::failure::Failure;
use crate::machine::memory_bytes;
use crate::open::{self, Access, Use};
use crate::protocol::Protocol;
use blockmux_proto::exports::Export;
use blockmux_proto::served::Served;
use blockmux_volume::units::human_size;
use blockmux_volume::{Spec, VolumeInfo};
use std::path::PathBuf;
use std::sync::Arc;
use tracing::warn;

/// A volume that is to be served.
#[derive(Debug)]
pub(super) struct NamedVolume {
    pub(super) name: String,
    pub(super) spec: Spec,
    pub(super) read_only: bool,
    pub(super) description: String,
    /// What serves it, in the words of `protocols`.
    pub(super) protocols: Option<Vec<String>>,
}

/// What it takes to open volumes.
pub(super) struct Opening {
    /// Those that they are served over; some may come several times.
    pub(super) protocols: Vec<&'static Protocol>,
    /// Refuse writes to all of them.
    pub(super) read_only: bool,
    /// There is somebody who can give them another size.
    pub(super) may_grow: bool,
    /// Where reservations are kept; `None` if there is no such place.
    pub(super) state: Option<PathBuf>,
}

impl NamedVolume {
    /// Whether the protocol has room for its description.
    pub(super) fn check_description(&self, protocol: &Protocol) -> Result<(), Failure> {
        let NamedVolume { name, description, .. } = self;
        let most = protocol.max_description;
        if description.len() > most || description.contains('\0') {
            return Err(Failure::request(format!(
                "the description of `{name}` has more than {most} bytes, or a NUL; shorten it"
            )));
        }
        Ok(())
    }
}

impl Opening {
    /// Opens a volume.
    pub(super) fn open(&self, named: &NamedVolume) -> Result<(Export, Arc<Served>), Failure> {
        let access = if named.read_only { Access::Read } else { Access::Either };
        let how = Use { access, connections: 1, may_grow: self.may_grow };
        let volume = open::open(&named.spec, how)?.volume;
        let memory = memory_bytes();
        if named.spec.ram_bytes() > memory {
            warn!(
                "{}: is larger than this machine's memory, {}: when that is full, the system ends programs",
                named.spec,
                human_size(memory)
            );
        }
        let info = volume.info();
        if info.size > LARGEST {
            return Err(Failure::request(format!(
                "{}: has {} bytes, and clients count to 2^63 - 1; serve a smaller volume",
                named.spec, info.size
            )));
        }
        self.protocols.iter().try_for_each(|protocol| check_blocks(protocol, &named.spec, &info))?;
        let (name, description) = (named.name.clone(), named.description.clone());
        let served = state::served(self.state.as_deref(), &name, &named.spec, volume.clone())?;
        Ok((Export { name, description, read_only: named.read_only, volume }, served))
    }
}

fn check_blocks(protocol: &Protocol, spec: &Spec, info: &VolumeInfo) -> Result<(), Failure> {
    let (title, most) = (protocol.title, protocol.max_logical_block);
    if info.logical_block > most {
        return Err(Failure::request(format!(
            "{spec}: has blocks of {} bytes, and {title} knows at most {most}; serve another volume",
            info.logical_block
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::NBD;

    #[test]
    fn a_description_is_short_and_blocks_are_small() {
        let named = |description| {
            let (name, spec) = ("a".to_owned(), Spec::Mem(1));
            NamedVolume { name, spec, read_only: false, description, protocols: None }
        };
        assert!(named("x".repeat(4096)).check_description(&NBD).is_ok());
        for description in ["x".repeat(4097), "a\0b".to_owned()] {
            let failure = named(description).check_description(&NBD).unwrap_err().to_string();
            assert!(failure.starts_with("the description of `a` has more than 4096 bytes"), "{failure}");
        }
        let info = |logical_block| VolumeInfo { logical_block, ..VolumeInfo::new(1 << 30) };
        assert!(check_blocks(&NBD, &Spec::Mem(1), &info(1 << 16)).is_ok());
        let failure = check_blocks(&NBD, &Spec::Mem(1), &info(1 << 17)).unwrap_err().to_string();
        assert!(failure.starts_with("mem:1: has blocks of 131072 bytes"), "{failure}");
    }
}
