//! ublk, Linux's driver of block devices in user space: `linux/ublk_cmd.h`.
//!
//! A server sends control commands ([`CtrlCmd`]) to `/dev/ublk-control` and I/O commands
//! ([`IoCmd`]) to `/dev/ublkcN`, both as commands of io_uring. The driver describes each request in
//! memory that it shares with the server ([`IoDesc`]). Numbers have the machine's own byte order.
//! No structure here has padding.

use crate::layout::native_layout;
use crate::open_enum::open_enum;

native_layout! {
    /// The payload of a control command (`struct ublksrv_ctrl_cmd`).
    pub struct CtrlCmd(32) {
        /// The device; [`ANY_DEVICE`] if the command concerns none, or a new one.
        pub dev_id: u32,
        /// The queue; [`NO_QUEUE`] if the command concerns the whole device.
        pub queue_id: u16,
        /// Length of the buffer in bytes.
        pub len: u16,
        /// Address of the buffer, which the command reads or writes.
        pub addr: u64,
        /// A number, such as the server's process ID.
        pub data: u64,
        /// Length of a path at the start of the buffer, for devices of unprivileged users.
        pub dev_path_len: u16,
        pub pad: u16 = 0,
        pub reserved: u32 = 0,
    }

    /// Properties of a device (`struct ublksrv_ctrl_dev_info`).
    pub struct DevInfo(64) {
        /// Number of queues.
        pub nr_hw_queues: u16,
        /// Maximum number of requests in flight on each queue.
        pub queue_depth: u16,
        /// A [`DevState`].
        pub state: u16,
        pub pad0: u16 = 0,
        /// Length of the longest request in bytes.
        pub max_io_buf_bytes: u32,
        /// Number of the device; [`ANY_DEVICE`] lets the driver choose one.
        pub dev_id: u32,
        /// Process ID of the server; -1 if there is none.
        pub ublksrv_pid: i32,
        pub pad1: u32 = 0,
        /// Its [`Features`].
        pub flags: u64,
        /// A number of the server, which the driver only keeps.
        pub ublksrv_flags: u64,
        /// User ID of the owner.
        pub owner_uid: u32,
        /// Group ID of the owner.
        pub owner_gid: u32,
        pub reserved1: u64 = 0,
        pub reserved2: u64 = 0,
    }
}

open_enum! {
    /// State of a device (`UBLK_S_DEV_*`).
    pub enum DevState(u16) {
        /// It has no disk: it was not started, or was stopped.
        DEAD = 0,
        /// It serves requests.
        LIVE = 1,
        /// Its server has ended. Requests wait for another one.
        QUIESCED = 2,
    }
}

bitflags::bitflags! {
    /// Features of a device, and of the driver (`UBLK_F_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// The driver tells of a write before it copies its data, so that the server can choose the
        /// memory then.
        const NEED_GET_DATA = 1 << 2;
        /// Requests wait for another server when the device's server has ended.
        const USER_RECOVERY = 1 << 3;
        /// With `USER_RECOVERY`, requests that the server had not completed are sent to the next
        /// one.
        const USER_RECOVERY_REISSUE = 1 << 4;
        /// The owner of the device needs no privileges.
        const UNPRIVILEGED_DEV = 1 << 5;
        /// Commands are encoded as those of ioctl(2).
        const CMD_IOCTL_ENCODE = 1 << 6;
        /// The server copies data by pread(2) and pwrite(2) on `/dev/ublkcN`.
        const USER_COPY = 1 << 7;
        /// The size of a disk can change (Linux 6.16).
        const UPDATE_SIZE = 1 << 10;
        /// The driver registers the pages of each request with the ring of its command (Linux
        /// 6.16).
        const AUTO_BUF_REG = 1 << 11;
    }
}

native_layout! {
    /// A request of the device (`struct ublksrv_io_desc`).
    pub struct IoDesc(24) {
        /// An [`IoOp`] in the lowest 8 bits, flags `UBLK_IO_F_*` in the others.
        pub op_flags: u32,
        /// Length in sectors of 512 bytes.
        pub nr_sectors: u32,
        /// First sector.
        pub start_sector: u64,
        /// Address of the server's buffer; unused with [`Features::USER_COPY`].
        pub addr: u64,
    }
}

impl IoDesc {
    /// The operation.
    #[must_use]
    pub const fn op(&self) -> IoOp {
        IoOp(self.op_flags as u8)
    }

    /// Whether a flag `UBLK_IO_F_*` is set.
    #[must_use]
    pub const fn has(&self, flag: u32) -> bool {
        self.op_flags & flag != 0
    }
}

open_enum! {
    /// Operation of a request (`UBLK_IO_OP_*`).
    pub enum IoOp(u8) {
        /// Read.
        READ = 0,
        /// Write.
        WRITE = 1,
        /// Flush the write cache.
        FLUSH = 2,
        /// Discard.
        DISCARD = 3,
        /// Write zeroes.
        WRITE_ZEROES = 5,
    }
}

native_layout! {
    /// The payload of an I/O command (`struct ublksrv_io_cmd`).
    pub struct IoCmd(16) {
        /// The queue.
        pub q_id: u16,
        /// Tag of the request in its queue.
        pub tag: u16,
        /// Result of the completed request: number of bytes, or an error number, negative.
        pub result: i32,
        /// Address of the data: to which that of a write is copied, or from which that of a read
        /// is; 0 with [`Features::USER_COPY`].
        pub addr: u64,
    }

    /// Parameters of a device's disk (`struct ublk_params`).
    pub struct Params(120) {
        /// Length of this structure in bytes.
        pub len: u32,
        /// The parts that are set: [`UBLK_PARAM_TYPE_BASIC`], [`UBLK_PARAM_TYPE_DISCARD`],
        /// [`UBLK_PARAM_TYPE_DMA_ALIGN`].
        pub types: u32,
        /// Size, blocks and cache.
        pub basic: ParamBasic,
        /// Discards and zeroes.
        pub discard: ParamDiscard,
        /// Numbers of the devices, which the driver sets.
        pub devt: [u32; 4],
        /// Parameters of zoned devices.
        pub zoned: [u32; 8],
        /// Alignment of data in memory in bytes, less 1. Drivers before Linux 6.15 end here.
        pub dma_alignment: u32,
        pub pad: u32 = 0,
        /// The end of the part that is used here, which is a multiple of 8 bytes.
        pub end: u32,
    }

    /// Size, blocks and cache of a disk (`struct ublk_param_basic`).
    pub struct ParamBasic(32) {
        /// Flags `UBLK_ATTR_*`.
        pub attrs: u32,
        /// Logical block, as a power of two.
        pub logical_bs_shift: u8,
        /// Physical block, as a power of two.
        pub physical_bs_shift: u8,
        /// Preferred block, as a power of two.
        pub io_opt_shift: u8,
        /// Smallest preferred block, as a power of two.
        pub io_min_shift: u8,
        /// Length of the longest request in sectors.
        pub max_sectors: u32,
        /// No request crosses a multiple of this many sectors; 0: no limit.
        pub chunk_sectors: u32,
        /// Size in sectors.
        pub dev_sectors: u64,
        /// Alignment of data in memory.
        pub virt_boundary_mask: u64,
    }

    /// Discards and zeroes of a disk (`struct ublk_param_discard`).
    pub struct ParamDiscard(20) {
        /// Offset of the first unit of discards, in bytes.
        pub discard_alignment: u32,
        /// Unit of discards in bytes; not 0.
        pub discard_granularity: u32,
        /// Length of the longest discard in sectors; 0: there are none.
        pub max_discard_sectors: u32,
        /// Length of the longest write of zeroes in sectors; 0: there are none.
        pub max_write_zeroes_sectors: u32,
        /// Number of ranges in one discard: 1.
        pub max_discard_segments: u16,
        pub reserved0: u16 = 0,
    }
}

open_enum! {
    /// A control command (`UBLK_U_CMD_*`).
    pub enum ControlOp(u32) {
        /// Describe a device.
        GET_DEV_INFO = ioctl(READ, 0x02, size_of::<CtrlCmd>()),
        /// Add a device without a disk.
        ADD_DEV = ioctl(READ | WRITE, 0x04, size_of::<CtrlCmd>()),
        /// Delete a device.
        DEL_DEV = ioctl(READ | WRITE, 0x05, size_of::<CtrlCmd>()),
        /// Add the disk.
        START_DEV = ioctl(READ | WRITE, 0x06, size_of::<CtrlCmd>()),
        /// Remove the disk.
        STOP_DEV = ioctl(READ | WRITE, 0x07, size_of::<CtrlCmd>()),
        /// Set the parameters of the disk.
        SET_PARAMS = ioctl(READ | WRITE, 0x08, size_of::<CtrlCmd>()),
        /// Get the parameters of the disk.
        GET_PARAMS = ioctl(READ, 0x09, size_of::<CtrlCmd>()),
        /// Prepare a quiesced device for another server.
        START_USER_RECOVERY = ioctl(READ | WRITE, 0x10, size_of::<CtrlCmd>()),
        /// Serve requests again.
        END_USER_RECOVERY = ioctl(READ | WRITE, 0x11, size_of::<CtrlCmd>()),
        /// Describe a device of any user; the buffer begins with the path of its node.
        GET_DEV_INFO2 = ioctl(READ, 0x12, size_of::<CtrlCmd>()),
        /// Get the features of the driver, 8 bytes.
        GET_FEATURES = ioctl(READ, 0x13, size_of::<CtrlCmd>()),
        /// Delete a device once nobody uses it.
        DEL_DEV_ASYNC = ioctl(READ, 0x14, size_of::<CtrlCmd>()),
        /// Set the size of the disk in sectors.
        UPDATE_SIZE = ioctl(READ | WRITE, 0x15, size_of::<CtrlCmd>()),
    }

    /// An I/O command (`UBLK_U_IO_*`).
    pub enum QueueOp(u32) {
        /// Completes with the first request that has its tag.
        FETCH_REQ = ioctl(READ | WRITE, 0x20, size_of::<IoCmd>()),
        /// Completes a request, and then itself with the next one that has its tag.
        COMMIT_AND_FETCH_REQ = ioctl(READ | WRITE, 0x21, size_of::<IoCmd>()),
        /// Copies the data of a write to an address, and completes with the request.
        NEED_GET_DATA = ioctl(READ | WRITE, 0x22, size_of::<IoCmd>()),
    }
}

/// The code of a command as of ioctl(2).
const fn ioctl(direction: u32, number: u32, len: usize) -> u32 {
    direction | (len as u32) << 16 | (b'u' as u32) << 8 | number
}

/// The address in the entry of an I/O command of a device with [`Features::AUTO_BUF_REG`]
/// (`struct ublk_auto_buf_reg`): the driver registers the pages of the next request as the buffer
/// `index` of the ring. If it cannot, the request has [`UBLK_IO_F_NEED_REG_BUF`].
#[must_use]
pub const fn auto_buf_reg(index: u16) -> u64 {
    index as u64 | UBLK_AUTO_BUF_REG_FALLBACK << 16
}

/// Position in `/dev/ublkcN` of the data of a request, in bytes.
#[must_use]
pub const fn data_position(queue: u16, tag: u16) -> u64 {
    // A sum: a tag from 64 on has the bit of the offset, too.
    UBLKSRV_IO_BUF_OFFSET + ((queue as u64) << UBLK_QID_OFF) + ((tag as u64) << UBLK_TAG_OFF)
}

/// Position in `/dev/ublkcN` of the [`IoDesc`]s of a queue, in bytes.
#[must_use]
pub const fn descs_position(queue: u16, page: u64) -> u64 {
    queue as u64 * (UBLK_MAX_QUEUE_DEPTH as u64 * size_of::<IoDesc>() as u64).next_multiple_of(page)
}

/// No device in particular.
pub const ANY_DEVICE: u32 = u32::MAX;
/// No queue in particular.
pub const NO_QUEUE: u16 = u16::MAX;
/// Result of an I/O command that has a request.
pub const UBLK_IO_RES_OK: i32 = 0;
/// Result of an I/O command that has a write whose data was not copied yet
/// ([`Features::NEED_GET_DATA`]).
pub const UBLK_IO_RES_NEED_GET_DATA: i32 = 1;
/// A completed write is on stable storage.
pub const UBLK_IO_F_FUA: u32 = 1 << 13;
/// The pages of the request are not registered, although [`Features::AUTO_BUF_REG`] is set.
pub const UBLK_IO_F_NEED_REG_BUF: u32 = 1 << 17;
/// Zeroed blocks stay allocated.
pub const UBLK_IO_F_NOUNMAP: u32 = 1 << 15;
/// [`Params::basic`] is set.
pub const UBLK_PARAM_TYPE_BASIC: u32 = 1 << 0;
/// [`Params::discard`] is set.
pub const UBLK_PARAM_TYPE_DISCARD: u32 = 1 << 1;
/// [`Params::dma_alignment`] is set.
pub const UBLK_PARAM_TYPE_DMA_ALIGN: u32 = 1 << 4;
/// Writes are refused.
pub const UBLK_ATTR_READ_ONLY: u32 = 1 << 0;
/// The storage has spinning disks.
pub const UBLK_ATTR_ROTATIONAL: u32 = 1 << 1;
/// The disk has a volatile write cache.
pub const UBLK_ATTR_VOLATILE_CACHE: u32 = 1 << 2;
/// The disk supports force unit access.
pub const UBLK_ATTR_FUA: u32 = 1 << 3;
/// The maximum depth of a queue.
pub const UBLK_MAX_QUEUE_DEPTH: u16 = 4096;
/// A request whose pages cannot be registered comes without.
const UBLK_AUTO_BUF_REG_FALLBACK: u64 = 1 << 0;
const UBLKSRV_IO_BUF_OFFSET: u64 = 0x8000_0000;
const UBLK_TAG_OFF: u32 = 25;
const UBLK_QID_OFF: u32 = 41;
/// Direction of data in a command's code: to the driver.
const WRITE: u32 = 1 << 30;
/// Direction of data in a command's code: from the driver.
const READ: u32 = 2 << 30;

#[cfg(all(test, target_endian = "little"))]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn commands_have_the_codes_of_the_header() {
        for (command, code) in [
            (ControlOp::GET_DEV_INFO, 0x8020_7502),
            (ControlOp::ADD_DEV, 0xc020_7504),
            (ControlOp::DEL_DEV, 0xc020_7505),
            (ControlOp::START_DEV, 0xc020_7506),
            (ControlOp::STOP_DEV, 0xc020_7507),
            (ControlOp::SET_PARAMS, 0xc020_7508),
            (ControlOp::GET_PARAMS, 0x8020_7509),
            (ControlOp::START_USER_RECOVERY, 0xc020_7510),
            (ControlOp::END_USER_RECOVERY, 0xc020_7511),
            (ControlOp::GET_DEV_INFO2, 0x8020_7512),
            (ControlOp::GET_FEATURES, 0x8020_7513),
            (ControlOp::DEL_DEV_ASYNC, 0x8020_7514),
            (ControlOp::UPDATE_SIZE, 0xc020_7515),
        ] {
            assert_eq!(command.0, code, "{command}");
        }
        assert_eq!(QueueOp::FETCH_REQ.0, 0xc010_7520);
        assert_eq!(QueueOp::COMMIT_AND_FETCH_REQ.0, 0xc010_7521);
        assert_eq!(QueueOp::NEED_GET_DATA.0, 0xc010_7522);
    }

    // The bytes that a C program with the header of Linux 6.12 prints.

    #[test]
    fn commands_have_the_layout_of_the_header() {
        let command = CtrlCmd {
            dev_id: 7,
            queue_id: NO_QUEUE,
            len: 0x1122,
            addr: 0x1122_3344_5566_7788,
            data: 0x99,
            ..CtrlCmd::default()
        };
        let mut bytes = [0; 32];
        bytes[..17].copy_from_slice(&[
            7, 0, 0, 0, 0xff, 0xff, 0x22, 0x11, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x99,
        ]);
        assert_eq!(command.as_bytes(), bytes);
        let command = IoCmd { q_id: 3, tag: 0x102, result: -5, addr: 0 };
        assert_eq!(command.as_bytes(), [3, 0, 2, 1, 0xfb, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_request_has_the_layout_of_the_header() {
        let bytes = [1, 0x20, 0, 0, 8, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let request = IoDesc::read_from_bytes(&bytes).unwrap();
        assert_eq!((request.op(), request.nr_sectors, request.start_sector), (IoOp::WRITE, 8, 0x1000));
        assert!(request.has(UBLK_IO_F_FUA) && !request.has(UBLK_IO_F_NOUNMAP));
    }

    #[test]
    fn properties_have_the_layout_of_the_header() {
        let features = Features::USER_COPY
            | Features::USER_RECOVERY
            | Features::USER_RECOVERY_REISSUE
            | Features::CMD_IOCTL_ENCODE;
        let info = DevInfo {
            nr_hw_queues: 2,
            queue_depth: 128,
            state: DevState::QUIESCED.0,
            max_io_buf_bytes: 1 << 20,
            dev_id: 9,
            ublksrv_pid: 4321,
            flags: features.bits(),
            ublksrv_flags: 0x1122_3344_5566_7788,
            owner_uid: 1000,
            owner_gid: 100,
            ..DevInfo::default()
        };
        let mut bytes = [0; 64];
        bytes[..48].copy_from_slice(&[
            2, 0, 0x80, 0, 2, 0, 0, 0, 0, 0, 0x10, 0, 9, 0, 0, 0, // the first line
            0xe1, 0x10, 0, 0, 0, 0, 0, 0, 0xd8, 0, 0, 0, 0, 0, 0, 0, // process and features
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xe8, 3, 0, 0, 0x64, 0, 0, 0,
        ]);
        assert_eq!(info.as_bytes(), bytes);
    }

    #[test]
    fn parameters_have_the_layout_of_the_header() {
        let basic = ParamBasic {
            attrs: UBLK_ATTR_VOLATILE_CACHE | UBLK_ATTR_FUA,
            logical_bs_shift: 9,
            physical_bs_shift: 12,
            io_opt_shift: 16,
            io_min_shift: 12,
            max_sectors: 2048,
            dev_sectors: 0x12_3456_789a,
            ..ParamBasic::default()
        };
        let discard = ParamDiscard {
            discard_granularity: 4096,
            max_discard_sectors: 0x20_0000,
            max_write_zeroes_sectors: 0x1_0000,
            max_discard_segments: 1,
            ..ParamDiscard::default()
        };
        let types = UBLK_PARAM_TYPE_BASIC | UBLK_PARAM_TYPE_DISCARD;
        let types = types | UBLK_PARAM_TYPE_DMA_ALIGN;
        let params = Params { len: 120, types, basic, discard, dma_alignment: 511, ..Params::default() };
        let mut bytes = [0; 120];
        bytes[..60].copy_from_slice(&[
            0x78, 0, 0, 0, 0x13, 0, 0, 0, 0xc, 0, 0, 0, 9, 0xc, 0x10, 0xc, 0, 8, 0, 0, // to max_sectors
            0, 0, 0, 0, 0x9a, 0x78, 0x56, 0x34, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // to the mask
            0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0x20, 0, 0, 0, 1, 0, 1, 0, 0, 0,
        ]);
        bytes[108..110].copy_from_slice(&[0xff, 1]);
        assert_eq!(params.as_bytes(), bytes);
    }

    #[test]
    fn a_buffer_is_named_with_the_flag_to_go_on_without() {
        assert_eq!(auto_buf_reg(0x1122), 0x1_1122);
    }

    #[test]
    fn data_and_requests_of_each_queue_have_their_places() {
        assert_eq!(data_position(0, 0), 0x8000_0000);
        assert_eq!(data_position(1, 2), 0x8000_0000 + (1 << 41) + (2 << 25));
        assert_eq!(data_position(0, 64), 0x1_0000_0000);
        assert_eq!(descs_position(3, 4096), 3 * 4096 * 24);
        assert_eq!(descs_position(1, 65_536), 2 * 65_536);
    }
}
