//! Result of a handshake: the export, the header format and the metadata context.

use crate::exports::{Export, VolumeId};
use crate::nbd::HeaderFormat;
use blockmux_volume::{MAX_TRANSFER, VolumeInfo};
use blockmux_wire::nbd::handshake::*;
use zerocopy::{U16, U32};

/// Parameters of the transmission phase, which do not change during it.
#[derive(Clone, Debug)]
pub(super) struct ServerParams {
    pub(super) volume: VolumeId,
    /// The volume's properties as advertised; `read_only` also if the export is read-only.
    pub(super) info: VolumeInfo,
    pub(super) headers: HeaderFormat,
    /// Whether `base:allocation` was selected for this export.
    pub(super) base_allocation: bool,
    /// Whether the client requested the block sizes, so that it has to respect them.
    pub(super) respects_sizes: bool,
}

impl ServerParams {
    /// The parameters for an export, with the volume's current size and limits.
    pub(super) fn new(
        volume: VolumeId,
        export: &Export,
        headers: HeaderFormat,
        base_allocation: bool,
        respects_sizes: bool,
    ) -> ServerParams {
        ServerParams { volume, info: export.info(), headers, base_allocation, respects_sizes }
    }

    /// The maximum length of a read or write, in bytes. A client that respects the block sizes was
    /// told the first one.
    #[inline]
    pub(super) fn max_request(&self) -> u64 {
        if self.respects_sizes { MAX_TRANSFER.into() } else { MAX_SPLIT_REQUEST }
    }

    /// The volume's block, in bytes.
    #[inline]
    pub(super) fn block(&self) -> u64 {
        self.info.logical_block.into()
    }

    /// The transmission flags, which follow from the volume's properties and the header format.
    ///
    /// Flush and FUA are always offered, also without a write cache: clients take their absence
    /// for "this server cannot flush" and fail fsync.
    pub(super) fn transmission_flags(&self) -> TransmissionFlags {
        let info = &self.info;
        let writable = !info.read_only;
        [
            (ALWAYS, true),
            (TransmissionFlags::READ_ONLY, info.read_only),
            (TransmissionFlags::ROTATIONAL, info.rotational),
            (TransmissionFlags::SEND_TRIM, writable && info.discard_granularity > 0),
            (TransmissionFlags::SEND_WRITE_ZEROES, writable),
            (TransmissionFlags::SEND_FAST_ZERO, writable && info.fast_zeroes),
            (TransmissionFlags::SEND_DF, self.headers != HeaderFormat::Simple),
            (TransmissionFlags::CAN_MULTI_CONN, info.shared_flush),
            (
                TransmissionFlags::BLOCK_STATUS_PAYLOAD,
                self.headers == HeaderFormat::Extended && self.base_allocation,
            ),
        ]
        .into_iter()
        .filter_map(|(flags, offered)| offered.then_some(flags))
        .collect()
    }

    /// The payload of `NBD_INFO_EXPORT`.
    pub(super) fn info_export(&self) -> InfoExport {
        InfoExport {
            info_type: U16::new(Info::NBD_INFO_EXPORT.0),
            size: self.info.size.into(),
            transmission_flags: U16::new(self.transmission_flags().bits()),
        }
    }

    /// The payload of `NBD_INFO_BLOCK_SIZE`. The minimum is the volume's logical block if the
    /// client has to respect it, and otherwise a byte.
    pub(super) fn info_block_size(&self) -> InfoBlockSize {
        let block = self.info.logical_block;
        InfoBlockSize {
            info_type: U16::new(Info::NBD_INFO_BLOCK_SIZE.0),
            minimum: U32::new(if self.respects_sizes { block } else { 1 }),
            preferred: U32::new(self.info.preferred_block.max(block).clamp(512, MAX_TRANSFER)),
            maximum_payload: U32::new(MAX_TRANSFER),
        }
    }
}

/// The maximum length of a read or write of a client that did not request the block sizes, in
/// bytes; it is split. nbdkit takes as much.
pub(super) const MAX_SPLIT_REQUEST: u64 = 64 << 20;

/// Transmission flags of every export.
const ALWAYS: TransmissionFlags = TransmissionFlags::HAS_FLAGS
    .union(TransmissionFlags::SEND_FLUSH)
    .union(TransmissionFlags::SEND_FUA)
    .union(TransmissionFlags::SEND_CACHE);

#[cfg(test)]
mod tests {
    use super::*;

    fn params(info: VolumeInfo, headers: HeaderFormat) -> ServerParams {
        ServerParams { volume: VolumeId(0), info, headers, base_allocation: true, respects_sizes: true }
    }

    #[test]
    fn a_plain_volume_offers_flush_fua_cache_zeroes_and_several_connections() {
        assert_eq!(
            params(VolumeInfo::new(1 << 20), HeaderFormat::Simple).transmission_flags().bits(),
            0x054d
        );
    }

    #[test]
    fn each_property_of_a_volume_has_its_flag() {
        let plain = || VolumeInfo::new(1 << 20);
        let base = TransmissionFlags::from_bits_retain(0x054d);
        let table = [
            (VolumeInfo { discard_granularity: 4096, ..plain() }, base | TransmissionFlags::SEND_TRIM),
            (VolumeInfo { fast_zeroes: true, ..plain() }, base | TransmissionFlags::SEND_FAST_ZERO),
            (VolumeInfo { rotational: true, ..plain() }, base | TransmissionFlags::ROTATIONAL),
            (VolumeInfo { shared_flush: false, ..plain() }, base & !TransmissionFlags::CAN_MULTI_CONN),
            (
                VolumeInfo { read_only: true, discard_granularity: 4096, fast_zeroes: true, ..plain() },
                (base | TransmissionFlags::READ_ONLY) & !TransmissionFlags::SEND_WRITE_ZEROES,
            ),
        ];
        for (info, flags) in table {
            assert_eq!(params(info.clone(), HeaderFormat::Simple).transmission_flags(), flags, "{info:?}");
        }
    }

    #[test]
    fn the_header_format_determines_its_flags() {
        let flags = |headers| params(VolumeInfo::new(1 << 20), headers).transmission_flags();
        let base = TransmissionFlags::from_bits_retain(0x054d);
        assert_eq!(flags(HeaderFormat::Structured), base | TransmissionFlags::SEND_DF);
        assert_eq!(
            flags(HeaderFormat::Extended),
            base | TransmissionFlags::SEND_DF | TransmissionFlags::BLOCK_STATUS_PAYLOAD
        );
    }

    #[test]
    fn preferred_blocks_are_at_least_512_bytes_and_at_most_the_maximum() {
        let info = VolumeInfo { logical_block: 1, preferred_block: 1, ..VolumeInfo::new(100) };
        let sizes = params(info, HeaderFormat::Simple).info_block_size();
        assert_eq!((sizes.minimum.get(), sizes.preferred.get()), (1, 512));
        assert_eq!(sizes.maximum_payload.get(), 32 << 20);
        let info = VolumeInfo { logical_block: 4096, physical_block: 8192, ..VolumeInfo::new(1 << 20) };
        let asked = params(info, HeaderFormat::Simple);
        let not_asked = ServerParams { respects_sizes: false, ..asked.clone() };
        for (params, minimum) in [(asked, 4096), (not_asked, 1)] {
            let sizes = params.info_block_size();
            assert_eq!((sizes.minimum.get(), sizes.preferred.get()), (minimum, 4096));
        }
        let info = VolumeInfo { preferred_block: 64 << 20, ..VolumeInfo::new(1 << 30) };
        assert_eq!(params(info, HeaderFormat::Simple).info_block_size().preferred.get(), 32 << 20);
    }
}
