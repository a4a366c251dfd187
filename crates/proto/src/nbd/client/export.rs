//! The description of an export from the handshake, and its properties as a volume.

use crate::driver::session::ProtocolError;
use crate::nbd::HeaderFormat;
use blockmux_volume::{MAX_TRANSFER, VolumeInfo};
use blockmux_wire::nbd::NBD_MAX_MINIMUM_BLOCK;
use blockmux_wire::nbd::handshake::{InfoBlockSize, TransmissionFlags};

/// One entry of a server's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedExport {
    /// The name to use in `NBD_OPT_GO`.
    pub name: String,
    /// Description for people; may be empty.
    pub description: String,
}

/// An export as the server described it, and the negotiated header format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The canonical name that the server sent, or else the requested name.
    pub name: String,
    /// Description for people; may be empty.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// The operations that the server offers, and properties of the export.
    pub flags: TransmissionFlags,
    /// The server's size constraints, if it sent any.
    pub block_size: Option<BlockSize>,
    /// The metadata contexts that were selected; with [`super::NbdSessionMode::Info`], those that
    /// the server offers.
    pub contexts: Vec<String>,
    /// Format of the messages of the transmission phase.
    pub headers: HeaderFormat,
}

/// Size constraints (proto.md, "Size constraints"), in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    /// Offsets and lengths are multiples of this; a power of two up to 65,536.
    pub minimum: u32,
    /// The size and alignment of efficient requests; a power of two, not below `minimum`.
    pub preferred: u32,
    /// The maximum payload of one message, at least 512.
    pub maximum_payload: u32,
}

impl BlockSize {
    /// Parses and checks the constraints.
    ///
    /// # Errors
    ///
    /// Constraints that no request can meet. A preferred size below 512 is accepted, because
    /// servers older than the section send it.
    pub(super) fn from_wire(info: &InfoBlockSize) -> Result<BlockSize, ProtocolError> {
        let sizes = BlockSize {
            minimum: info.minimum.get(),
            preferred: info.preferred.get(),
            maximum_payload: info.maximum_payload.get(),
        };
        let fault = |what| Err(ProtocolError { what, reference: "proto.md, \"Size constraints\"" });
        if !sizes.minimum.is_power_of_two() || sizes.minimum > NBD_MAX_MINIMUM_BLOCK {
            return fault("advertised a minimum block size that is not a power of two up to 65536");
        }
        if !sizes.preferred.is_power_of_two() || sizes.preferred < sizes.minimum {
            return fault("advertised a preferred block size that is not a power of two above the minimum");
        }
        if sizes.maximum_payload < sizes.minimum.max(SECTOR) {
            return fault("advertised a maximum payload smaller than a block");
        }
        Ok(sizes)
    }
}

impl ExportInfo {
    /// The export's properties as a volume.
    ///
    /// The logical block is the server's minimum, raised to 512 bytes if 512 divides the export's
    /// size: the upper layers expect sectors, and the protocol recommends them to clients. If 512
    /// does not divide the size, the block is the largest power of two that does, so that the last
    /// bytes are accessible. If the server's minimum does not divide the size either, the volume
    /// ends at the last complete block.
    #[must_use]
    pub fn volume_info(&self) -> VolumeInfo {
        let sizes = self.sizes();
        let has = |flag| self.flags.contains(flag);
        let whole = if self.size == 0 { SECTOR } else { 1 << self.size.trailing_zeros().min(9) };
        let logical_block = sizes.minimum.max(whole.min(SECTOR));
        let physical_block = sizes.preferred.max(logical_block);
        let can_zero_fast =
            has(TransmissionFlags::SEND_WRITE_ZEROES) && has(TransmissionFlags::SEND_FAST_ZERO);
        VolumeInfo {
            size: self.size & !u64::from(logical_block.wrapping_sub(1)),
            logical_block,
            physical_block,
            preferred_block: physical_block,
            read_only: has(TransmissionFlags::READ_ONLY),
            // A server with a write cache must offer flushes.
            write_cache: has(TransmissionFlags::SEND_FLUSH),
            volatile: false,
            discard_granularity: if has(TransmissionFlags::SEND_TRIM) { physical_block } else { 0 },
            fast_zeroes: can_zero_fast,
            shared_flush: has(TransmissionFlags::CAN_MULTI_CONN),
            // Short reads are borrowed from the receive buffer.
            lends_reads: true,
            registered_alignment: None,
            compare_and_write_unit: 0,
            rotational: has(TransmissionFlags::ROTATIONAL),
        }
    }

    /// The maximum payload of one request or reply, in bytes: a multiple of the logical block.
    #[must_use]
    pub fn max_payload(&self) -> u32 {
        let block = self.volume_info().logical_block;
        let most = self.sizes().maximum_payload.min(MAX_TRANSFER);
        most & !block.wrapping_sub(1)
    }

    fn sizes(&self) -> BlockSize {
        self.block_size.unwrap_or(DEFAULT_BLOCK_SIZE)
    }
}

/// The constraints of a server that sends none (proto.md, "Size constraints").
const DEFAULT_BLOCK_SIZE: BlockSize = BlockSize { minimum: 1, preferred: 4096, maximum_payload: 32 << 20 };
const SECTOR: u32 = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn export(size: u64, flags: TransmissionFlags, block_size: Option<BlockSize>) -> ExportInfo {
        ExportInfo {
            name: String::new(),
            description: String::new(),
            size,
            flags,
            block_size,
            contexts: Vec::new(),
            headers: HeaderFormat::Simple,
        }
    }

    fn sizes(minimum: u32, preferred: u32, maximum_payload: u32) -> Option<BlockSize> {
        Some(BlockSize { minimum, preferred, maximum_payload })
    }

    #[test]
    fn the_block_size_is_512_unless_the_size_or_the_server_requires_another() {
        let cases = [
            // export size, constraints: volume size, logical block, physical block, maximum payload
            ((1 << 20, None), (1 << 20, 512, 4096, 32 << 20)),
            ((0, None), (0, 512, 4096, 32 << 20)),
            ((1000, None), (1000, 8, 4096, 32 << 20)),
            ((1001, sizes(1, 4096, 5000)), (1001, 1, 4096, 5000)),
            ((1001, sizes(2, 512, 5001)), (1000, 2, 512, 5000)),
            ((1 << 20, sizes(4096, 65536, 70000)), (1 << 20, 4096, 65536, 69632)),
            ((10_000, sizes(4096, 4096, 4096)), (8192, 4096, 4096, 4096)),
            ((1 << 20, sizes(1, 1, u32::MAX)), (1 << 20, 512, 512, 32 << 20)),
        ];
        for ((size, block_size), expected) in cases {
            let export = export(size, TransmissionFlags::HAS_FLAGS, block_size);
            let info = export.volume_info();
            let got = (info.size, info.logical_block, info.physical_block, export.max_payload());
            assert_eq!(got, expected, "{size} {block_size:?}");
        }
    }

    #[test]
    fn durability_and_the_rest_come_from_the_flags() {
        let plain = export(4096, TransmissionFlags::HAS_FLAGS, None).volume_info();
        assert_eq!(
            plain,
            VolumeInfo { shared_flush: false, lends_reads: true, ..VolumeInfo::new(4096) },
            "a server without flags writes through"
        );
        let rich = export(4096, TransmissionFlags::all(), None).volume_info();
        assert!(
            rich.read_only && rich.write_cache && rich.fast_zeroes && rich.shared_flush && rich.rotational
        );
        assert_eq!(rich.discard_granularity, 4096);
        assert!(!export(4096, TransmissionFlags::SEND_FAST_ZERO, None).volume_info().fast_zeroes);
    }

    #[test]
    fn impossible_constraints_are_a_violation_by_the_server() {
        let read = |minimum: u32, preferred: u32, maximum: u32| {
            BlockSize::from_wire(&InfoBlockSize {
                info_type: 3.into(),
                minimum: minimum.into(),
                preferred: preferred.into(),
                maximum_payload: maximum.into(),
            })
        };
        assert!(read(1, 1, 512).is_ok() && read(65536, 65536, u32::MAX).is_ok());
        for (minimum, preferred, maximum) in
            [(0, 512, 4096), (3, 512, 4096), (1 << 17, 1 << 17, u32::MAX), (512, 256, 4096), (1, 0, 4096)]
        {
            assert!(read(minimum, preferred, maximum).is_err(), "{minimum} {preferred} {maximum}");
        }
        assert!(read(1, 512, 511).is_err() && read(4096, 4096, 4095).is_err());
    }

    #[test]
    fn flags_have_their_names() {
        let flags = TransmissionFlags::HAS_FLAGS | TransmissionFlags::SEND_RESIZE;
        let names: Vec<_> = flags.iter_names().map(|(name, _)| name).collect();
        assert_eq!(names, ["HAS_FLAGS", "SEND_RESIZE"]);
    }
}
