//! Runs the conformance suite on a block device or a file, as on every volume of Blockmux:
//!
//! ```text
//! cargo run --package blockmux-engine --example conforms -- /dev/ublkb0
//! ```
//! It overwrites the device, and says nothing if it conforms. A file is opened without the page
//! cache.

use blockmux_engine::core::reactor::{PollPolicy, Reactor};
use blockmux_engine::volume::file::{BlockOptions, FileOptions, FileVolume};
use blockmux_volume::conformance::{self, Harness};
use blockmux_volume::{Core, Volume, Waker};
use std::error::Error;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).map(PathBuf::from).ok_or("name a block device or a file")?;
    let volume: Arc<dyn Volume> = Arc::new(open(&path)?);
    let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 512 << 20)?;
    let core: Rc<dyn Core> = reactor.core().clone();
    let clock = core.clone();
    let turn = move || {
        // A deadline is always armed, so that a turn without I/O in flight ends, too.
        clock.wake_at(clock.now() + Duration::from_millis(5), &Waker::idle());
        let mut turns = 0..1;
        reactor.run_until(|| turns.next().is_none()).is_ok()
    };
    conformance::run(&mut Harness::new(core, volume, turn));
    Ok(())
}

/// Opens a block device, or a file.
fn open(path: &Path) -> Result<FileVolume, Box<dyn Error>> {
    let is_device = std::fs::metadata(path)?.file_type().is_block_device();
    Ok(match is_device {
        true => FileVolume::open_block(path, BlockOptions::default())?,
        false => FileVolume::open(path, FileOptions { direct: Some(true), ..FileOptions::default() })?,
    })
}
