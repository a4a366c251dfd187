//! The Identify data of a controller and a namespace that a host uses.

use super::refused::NvmeRefused;
use blockmux_volume::{MAX_TRANSFER, VolumeInfo};
use blockmux_wire::nvme::identify::{
    CMIC_ANA, DLFEAT_WRITE_ZEROES_DEALLOCATES, IdentifyController, IdentifyControllerNvm, IdentifyNamespace,
    NSATTR_WRITE_PROTECTED, NSFEAT_OPTPERF, NSFEAT_THIN, NamespaceDescriptor, NamespaceIdType,
    ONCS_DATASET_MANAGEMENT, ONCS_WRITE_ZEROES, SGLS_KEYED, SGLS_OFFSET, VWC_PRESENT,
};
use blockmux_wire::nvme::nvm::NLB_MASK;
use blockmux_wire::nvme::{CQE_LEN, SQE_LEN};
use data_encoding::HEXLOWER;
use std::time::Duration;
use uuid::Uuid;
use zerocopy::FromBytes;

/// A controller, by its Identify data and properties.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerInfo {
    /// Controller identifier, from Connect.
    pub cntlid: u16,
    /// The VS property.
    pub version: u32,
    /// Serial number.
    pub serial: String,
    /// Model number.
    pub model: String,
    /// Firmware revision.
    pub firmware: String,
    /// Number of I/O queues that the controller has allocated, if any were requested.
    pub io_queues: u16,
    /// Most entries of a queue.
    pub max_entries: u32,
    /// Longest data of one command, in bytes; `None` for no limit.
    pub max_transfer: Option<u64>,
    /// Longest in-capsule data on an I/O queue, in bytes.
    pub in_capsule: u32,
    /// Most outstanding commands of one queue (MAXCMD); 0 for as many as its entries.
    pub max_commands: u16,
    /// Optional NVM commands (ONCS).
    pub oncs: u16,
    /// Supported asynchronous events (OAES).
    pub oaes: u32,
    /// Number of ANA groups; `None` if the controller does not support ANA.
    pub ana_groups: Option<u32>,
    /// ANATT: longest ANA transition; zero if not reported.
    pub ana_transition: Duration,
    /// Command Retry Delay Times 1 to 3, which a status refers to.
    pub retry_delays: [Duration; 3],
    /// Whether a volatile write cache is present.
    pub write_cache: bool,
    /// WZSL: longest Write Zeroes, as log2 in units of the minimum page size; 0 if not reported.
    pub wzsl: u8,
    /// DMRSL: most logical blocks in one range of Dataset Management; 0 for no limit.
    pub dmrsl: u32,
    /// DMSL: most logical blocks of one Dataset Management; 0 for no limit.
    pub dmsl: u64,
    /// log2 of the minimum memory page size in bytes (CAP.MPSMIN).
    pub page_shift: u32,
}

/// A namespace, by its Identify data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// Namespace identifier.
    pub nsid: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Size of a logical block, in bytes.
    pub block_len: u32,
    /// Preferred write granularity, in bytes.
    pub physical_block: u32,
    /// Whether the namespace is write protected.
    pub read_only: bool,
    /// Whether writes are durable only after a flush.
    pub write_cache: bool,
    /// Whether the namespace is thinly provisioned.
    pub is_thin: bool,
    /// Longest data of one command, in bytes.
    pub max_transfer: u64,
    /// Most logical blocks of one Write Zeroes; `None` if not supported.
    pub max_zeroes_blocks: Option<u64>,
    /// Whether Write Zeroes deallocates on request (DEAC).
    pub zeroes_deallocate: bool,
    /// Most logical blocks that one command deallocates; `None` if not supported.
    pub max_deallocate_blocks: Option<u64>,
    /// Granularity of deallocation, in bytes.
    pub deallocate_granularity: u32,
    /// Optimal I/O boundary (NOIOB), in logical blocks; 0 for none.
    pub noiob: u16,
    /// ANA group identifier; 0 for none.
    pub ana_group: u32,
    /// Globally unique identifier as text: UUID, NGUID or EUI64; empty if the namespace has none.
    pub identity: String,
}

impl ControllerInfo {
    /// Adds the data of Identify Controller.
    ///
    /// # Errors
    /// If the transport uses keyed SGLs, and the controller does not support them.
    pub(super) fn identify(&mut self, data: &[u8], uses_keyed_sgls: bool) -> Result<(), NvmeRefused> {
        let Ok(identify) = IdentifyController::ref_from_bytes(data) else { return Ok(()) };
        let sgls = identify.sgls.get();
        if uses_keyed_sgls && sgls & SGLS_KEYED == 0 {
            return Err(NvmeRefused::NoKeyedSgls(sgls));
        }
        self.serial = text(&identify.sn);
        self.model = text(&identify.mn);
        self.firmware = text(&identify.fr);
        let pages = (identify.mdts > 0).then(|| 1_u64.checked_shl(identify.mdts.into())).flatten();
        self.max_transfer = pages.map(|pages| pages.saturating_mul(1 << self.page_shift.min(31)));
        // A command capsule includes the submission queue entry; the response capsule size is
        // fixed.
        let capsule = identify.ioccsz.get().saturating_mul(CQE_LEN as u32);
        // Data in a capsule begins directly after the command here, and over RDMA its SGL has an
        // offset.
        let has_in_capsule = identify.icdoff.get() == 0 && (!uses_keyed_sgls || sgls & SGLS_OFFSET != 0);
        self.in_capsule = if has_in_capsule { capsule.saturating_sub(SQE_LEN as u32) } else { 0 };
        self.max_commands = identify.maxcmd.get();
        self.oncs = identify.oncs.get();
        self.oaes = identify.oaes.get();
        self.ana_groups = (identify.cmic & CMIC_ANA != 0).then(|| identify.nanagrpid.get());
        self.ana_transition = Duration::from_secs(identify.anatt.into());
        // In units of 100 ms.
        self.retry_delays =
            identify.crdt.map(|time| Duration::from_millis(u64::from(time.get()).saturating_mul(100)));
        self.write_cache = identify.vwc & VWC_PRESENT != 0;
        Ok(())
    }

    /// Whether the controller reports Command Retry Delay Times.
    pub(super) fn has_retry_delays(&self) -> bool {
        self.retry_delays.iter().any(|delay| !delay.is_zero())
    }

    /// Adds the data of Identify Controller for the NVM Command Set.
    pub(super) fn identify_nvm(&mut self, data: &[u8]) {
        let Ok(identify) = IdentifyControllerNvm::ref_from_bytes(data) else { return };
        (self.wzsl, self.dmrsl, self.dmsl) = (identify.wzsl, identify.dmrsl.get(), identify.dmsl.get());
    }
}

impl NamespaceInfo {
    /// Adds the data of Identify Namespace.
    pub(super) fn identify(
        nsid: u32,
        data: &[u8],
        controller: &ControllerInfo,
    ) -> Result<NamespaceInfo, NvmeRefused> {
        let identify = IdentifyNamespace::ref_from_bytes(data).map_err(|_| NvmeRefused::NoNamespace(nsid))?;
        if identify.nsze.get() == 0 {
            return Err(NvmeRefused::NoNamespace(nsid));
        }
        // FLBAS: bits 3:0 and 6:5 form the format index.
        let format = usize::from(identify.flbas & 0xf | (identify.flbas >> 1 & 0x30));
        let format = identify.lbaf.get(format).copied().ok_or(NvmeRefused::NoNamespace(nsid))?;
        let (lbads, metadata) = (format.lbads, format.ms.get());
        if !LBADS.contains(&lbads) || metadata != 0 {
            return Err(NvmeRefused::Format { nsid, lbads, metadata });
        }
        let block_len = 1_u32 << (lbads & 31);
        let in_bytes = |blocks_less_one: u16| {
            let blocks = u32::from(blocks_less_one).saturating_add(1);
            let bytes = blocks.saturating_mul(block_len);
            if bytes.is_power_of_two() { bytes } else { block_len }
        };
        let has_hints = identify.nsfeat & NSFEAT_OPTPERF != 0;
        let hinted = |blocks: u16| if has_hints { in_bytes(blocks) } else { block_len };
        let blocks = identify.nsze.get().min(u64::MAX >> lbads);
        let max_blocks = u64::from(NLB_MASK).saturating_add(1);
        let most = u64::from(MAX_PER_COMMAND).min(max_blocks.saturating_mul(block_len.into()));
        let max_transfer = controller.max_transfer.map_or(most, |max| max.min(most));
        let max_transfer = max_transfer.max(block_len.into());
        let max_zeroes = match controller.wzsl {
            0 => controller.max_transfer,
            shift => 1_u64.checked_shl(u32::from(shift).saturating_add(controller.page_shift)),
        };
        let max_zeroes = max_zeroes.map_or(max_blocks, |bytes| (bytes >> lbads).clamp(1, max_blocks));
        let limit =
            |identify: u64| if identify == 0 { u32::MAX.into() } else { identify.min(u32::MAX.into()) };
        let max_deallocate = limit(controller.dmrsl.into()).min(limit(controller.dmsl));
        let can = |command: u16| controller.oncs & command != 0;
        Ok(NamespaceInfo {
            nsid,
            blocks,
            block_len,
            physical_block: hinted(identify.npwg.get()),
            read_only: identify.nsattr & NSATTR_WRITE_PROTECTED != 0,
            write_cache: controller.write_cache,
            is_thin: identify.nsfeat & NSFEAT_THIN != 0,
            max_transfer,
            max_zeroes_blocks: can(ONCS_WRITE_ZEROES).then_some(max_zeroes),
            zeroes_deallocate: identify.dlfeat & DLFEAT_WRITE_ZEROES_DEALLOCATES != 0,
            max_deallocate_blocks: can(ONCS_DATASET_MANAGEMENT).then_some(max_deallocate),
            deallocate_granularity: hinted(identify.npdg.get()),
            noiob: identify.noiob.get(),
            ana_group: identify.anagrpid.get(),
            identity: identity(&identify.nguid, &identify.eui64),
        })
    }

    /// Adds the namespace identification descriptors.
    pub(super) fn describe(&mut self, mut data: &[u8]) {
        while let Ok((head, rest)) = NamespaceDescriptor::read_from_prefix(data) {
            let Some((id, rest)) = rest.split_at_checked(head.nidl.into()) else { return };
            match NamespaceIdType(head.nidt) {
                NamespaceIdType(0) => return,
                NamespaceIdType::UUID if is_set(id) => {
                    if let Ok(uuid) = <&[u8; 16]>::try_from(id) {
                        self.identity = format!("{UUID}{}", uuid_text(uuid));
                        return;
                    }
                }
                _ => {}
            }
            data = rest;
        }
    }

    /// Size of the namespace, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.blocks.saturating_mul(self.block_len.into())
    }

    /// The properties of the namespace as a volume.
    #[must_use]
    pub fn volume_info(&self) -> VolumeInfo {
        let granularity = self.max_deallocate_blocks.map_or(0, |_| self.deallocate_granularity);
        VolumeInfo {
            logical_block: self.block_len,
            physical_block: self.physical_block.max(self.block_len),
            preferred_block: self.physical_block.max(self.block_len),
            read_only: self.read_only,
            write_cache: self.write_cache,
            discard_granularity: granularity,
            fast_zeroes: self.max_zeroes_blocks.is_some() && self.zeroes_deallocate,
            // The specification guarantees this for one controller; multipath hosts rely on it
            // across controllers as well.
            shared_flush: true,
            ..VolumeInfo::new(self.size())
        }
    }
}

/// Formats a UUID.
#[must_use]
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    Uuid::from_bytes(*uuid).to_string()
}

fn identity(nguid: &[u8; 16], eui64: &[u8; 8]) -> String {
    if is_set(nguid) {
        format!("nguid.{}", HEXLOWER.encode(nguid))
    } else if is_set(eui64) {
        format!("eui.{}", HEXLOWER.encode(eui64))
    } else {
        String::new()
    }
}

fn is_set(id: &[u8]) -> bool {
    id.iter().any(|&byte| byte != 0)
}

/// The printable part of an ASCII field that is padded with spaces.
pub(super) fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let letters = field.iter().take(end).map(|&byte| {
        let letter = char::from(byte);
        if letter.is_ascii_graphic() || letter == ' ' { letter } else { '?' }
    });
    letters.collect::<String>().trim().to_owned()
}

/// Prefix of an identity that only the descriptors contain.
pub(super) const UUID: &str = "uuid.";
/// Supported LBADS: logical blocks of 512 bytes to 64 KiB.
const LBADS: std::ops::RangeInclusive<u8> = 9..=16;
/// Longest data of one command, in bytes: more does not increase throughput, and some controllers
/// allocate memory for all of it.
const MAX_PER_COMMAND: u32 = 1 << 20;
const _: () = assert!(MAX_PER_COMMAND <= MAX_TRANSFER);
