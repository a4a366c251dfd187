//! Messages of a vhost-user front end, parsed.

use super::wire::Features;
use super::wire::ring::MAX_QUEUE_SIZE;
use super::wire::vhost_user::{
    ConfigHeader, FrontendRequest, INFLIGHT_PACKED_LEN, Inflight, MAX_CONFIG_LEN, MAX_TABLE_REGIONS,
    MESSAGE_F_NEED_REPLY, MESSAGE_F_REPLY, MESSAGE_VERSION, MESSAGE_VERSION_MASK, MemoryRegion,
    MemoryTableHeader, MessageHeader, ProtocolFeatures, SingleMemoryRegion, VRING_INDEX_MASK, VRING_NOFD,
    VringAddr, VringState,
};
use blockmux_wire::virtio::vhost_user::inflight_region;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A message of a front end. Indices of virtqueues, sizes and lengths are within their limits;
/// addresses are not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrontendMessage {
    /// Asks for the features that are offered.
    GetFeatures,
    /// The features that the driver has accepted.
    SetFeatures(Features),
    /// Asks for the protocol features.
    GetProtocolFeatures,
    /// The protocol features that are used.
    SetProtocolFeatures(ProtocolFeatures),
    /// A session begins.
    SetOwner,
    /// All virtqueues are disabled.
    ResetOwner,
    /// The device is reset.
    ResetDevice,
    /// Asks for the number of virtqueues.
    GetQueueNum,
    /// Asks for the number of memory regions.
    GetMaxMemSlots,
    /// All regions, each with a descriptor.
    SetMemTable(Vec<MemoryRegion>),
    /// Another region, with a descriptor.
    AddMemReg(MemoryRegion),
    /// A region is removed.
    RemMemReg(MemoryRegion),
    /// The size of a virtqueue.
    SetVringNum {
        /// The virtqueue.
        index: usize,
        /// Its size, a power of two.
        size: u16,
    },
    /// Where a virtqueue is.
    SetVringAddr {
        /// The virtqueue.
        index: usize,
        /// Its areas, in the front end's addresses.
        addr: VringAddr,
    },
    /// Where a virtqueue continues.
    SetVringBase {
        /// The virtqueue.
        index: usize,
        /// The index of its available ring.
        next_avail: u16,
    },
    /// Stops a virtqueue, and asks where it will continue.
    GetVringBase(usize),
    /// Enables or disables a virtqueue.
    SetVringEnable {
        /// The virtqueue.
        index: usize,
        /// Whether it takes requests.
        is_enabled: bool,
    },
    /// The event descriptor of the guest's notifications.
    SetVringKick(VringFd),
    /// The event descriptor of notifications to the guest.
    SetVringCall(VringFd),
    /// The event descriptor of errors.
    SetVringErr(VringFd),
    /// The socket for requests of the back end, with a descriptor.
    SetBackendReqFd,
    /// Asks for bytes of the configuration space.
    GetConfig(ConfigHeader),
    /// Changes the configuration space.
    SetConfig,
    /// Asks for memory that records requests in flight.
    GetInflightFd(Inflight),
    /// Memory that records requests in flight, with a descriptor.
    SetInflightFd(Inflight),
}

/// A virtqueue, and whether an event descriptor of it comes with the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringFd {
    /// The virtqueue.
    pub index: usize,
    /// Otherwise nobody notifies.
    pub has_fd: bool,
}

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The version or the flags of the header.
    #[error("its flags, {0:#x}, are not those of a request of version 1")]
    Flags(u32),
    /// The length of the payload.
    #[error("{request} has a payload of {len} bytes")]
    Length {
        /// The request.
        request: FrontendRequest,
        /// Length of the payload in bytes.
        len: usize,
    },
    /// A number in the payload.
    #[error("{request} names {value}, and the largest is {max}")]
    Number {
        /// The request.
        request: FrontendRequest,
        /// The number.
        value: u64,
        /// The limit.
        max: u64,
    },
    /// A request that is not supported.
    #[error("{0} is not supported")]
    Unsupported(FrontendRequest),
}

/// Length of a header's payload in bytes, and whether the front end wants a reply in any case.
///
/// # Errors
/// If it is not the header of a request, or its payload is too long.
pub fn message_header(header: &MessageHeader) -> Result<(usize, bool), MessageError> {
    let is_request =
        header.flags & MESSAGE_VERSION_MASK == MESSAGE_VERSION && header.flags & MESSAGE_F_REPLY == 0;
    if !is_request {
        return Err(MessageError::Flags(header.flags));
    }
    let (request, len) = (FrontendRequest(header.request), header.size as usize);
    if len > MAX_PAYLOAD {
        return Err(MessageError::Length { request, len });
    }
    Ok((len, header.flags & MESSAGE_F_NEED_REPLY != 0))
}

impl FrontendMessage {
    /// Parses a message.
    ///
    /// # Errors
    /// If it is not supported, or its payload makes no sense.
    pub fn parse(request: FrontendRequest, payload: &[u8]) -> Result<FrontendMessage, MessageError> {
        let payload = Payload { request, bytes: payload };
        Ok(match request {
            FrontendRequest::GET_FEATURES => FrontendMessage::GetFeatures,
            FrontendRequest::SET_FEATURES => {
                FrontendMessage::SetFeatures(Features::from_bits_retain(payload.whole()?))
            }
            FrontendRequest::GET_PROTOCOL_FEATURES => FrontendMessage::GetProtocolFeatures,
            FrontendRequest::SET_PROTOCOL_FEATURES => {
                FrontendMessage::SetProtocolFeatures(ProtocolFeatures::from_bits_retain(payload.whole()?))
            }
            FrontendRequest::SET_OWNER => FrontendMessage::SetOwner,
            FrontendRequest::RESET_OWNER => FrontendMessage::ResetOwner,
            FrontendRequest::RESET_DEVICE => FrontendMessage::ResetDevice,
            FrontendRequest::GET_QUEUE_NUM => FrontendMessage::GetQueueNum,
            FrontendRequest::GET_MAX_MEM_SLOTS => FrontendMessage::GetMaxMemSlots,
            FrontendRequest::SET_MEM_TABLE => FrontendMessage::SetMemTable(payload.regions()?),
            FrontendRequest::ADD_MEM_REG => {
                FrontendMessage::AddMemReg(payload.whole::<SingleMemoryRegion>()?.region)
            }
            FrontendRequest::REM_MEM_REG => {
                FrontendMessage::RemMemReg(payload.whole::<SingleMemoryRegion>()?.region)
            }
            FrontendRequest::SET_BACKEND_REQ_FD => FrontendMessage::SetBackendReqFd,
            FrontendRequest::GET_CONFIG => FrontendMessage::GetConfig(payload.config()?),
            FrontendRequest::SET_CONFIG => FrontendMessage::SetConfig,
            FrontendRequest::GET_INFLIGHT_FD => FrontendMessage::GetInflightFd(payload.inflight()?),
            FrontendRequest::SET_INFLIGHT_FD => FrontendMessage::SetInflightFd(payload.inflight()?),
            _ => return payload.parse_vring(),
        })
    }
}

/// The payload of a request.
struct Payload<'a> {
    request: FrontendRequest,
    bytes: &'a [u8],
}

impl Payload<'_> {
    fn parse_vring(&self) -> Result<FrontendMessage, MessageError> {
        Ok(match self.request {
            FrontendRequest::SET_VRING_NUM => {
                let (index, num) = self.vring()?;
                let size = u16::try_from(num).ok().filter(|size| size.is_power_of_two() && *size <= MAX_SIZE);
                let size = size.ok_or(self.number(num.into(), MAX_SIZE.into()))?;
                FrontendMessage::SetVringNum { index, size }
            }
            FrontendRequest::SET_VRING_ADDR => {
                let addr: VringAddr = self.whole()?;
                FrontendMessage::SetVringAddr { index: self.index(addr.index.into())?, addr }
            }
            FrontendRequest::SET_VRING_BASE => {
                let (index, num) = self.vring()?;
                let next_avail = u16::try_from(num).map_err(|_| self.number(num.into(), u16::MAX.into()))?;
                FrontendMessage::SetVringBase { index, next_avail }
            }
            FrontendRequest::GET_VRING_BASE => FrontendMessage::GetVringBase(self.vring()?.0),
            FrontendRequest::SET_VRING_ENABLE => {
                let (index, num) = self.vring()?;
                FrontendMessage::SetVringEnable { index, is_enabled: num != 0 }
            }
            FrontendRequest::SET_VRING_KICK => FrontendMessage::SetVringKick(self.vring_fd()?),
            FrontendRequest::SET_VRING_CALL => FrontendMessage::SetVringCall(self.vring_fd()?),
            FrontendRequest::SET_VRING_ERR => FrontendMessage::SetVringErr(self.vring_fd()?),
            request => return Err(MessageError::Unsupported(request)),
        })
    }

    fn length(&self) -> MessageError {
        MessageError::Length { request: self.request, len: self.bytes.len() }
    }

    fn number(&self, value: u64, max: u64) -> MessageError {
        MessageError::Number { request: self.request, value, max }
    }

    fn whole<T: FromBytes>(&self) -> Result<T, MessageError> {
        T::read_from_bytes(self.bytes).map_err(|_| self.length())
    }

    fn index(&self, index: u64) -> Result<usize, MessageError> {
        let found = usize::try_from(index).ok().filter(|index| *index < usize::from(MAX_QUEUES));
        found.ok_or(self.number(index, u64::from(MAX_QUEUES).saturating_sub(1)))
    }

    fn vring(&self) -> Result<(usize, u32), MessageError> {
        let VringState { index, num } = self.whole()?;
        Ok((self.index(index.into())?, num))
    }

    fn vring_fd(&self) -> Result<VringFd, MessageError> {
        let value: u64 = self.whole()?;
        Ok(VringFd { index: self.index(value & VRING_INDEX_MASK)?, has_fd: value & VRING_NOFD == 0 })
    }

    fn regions(&self) -> Result<Vec<MemoryRegion>, MessageError> {
        let (header, regions) = MemoryTableHeader::read_from_prefix(self.bytes).map_err(|_| self.length())?;
        let count = header.num_regions as usize;
        if count > MAX_TABLE_REGIONS {
            return Err(self.number(count as u64, MAX_TABLE_REGIONS as u64));
        }
        // A front end may send room for all of them.
        let regions = regions.chunks_exact(size_of::<MemoryRegion>()).take(count);
        let regions: Vec<_> = regions.filter_map(|bytes| MemoryRegion::read_from_bytes(bytes).ok()).collect();
        if regions.len() == count { Ok(regions) } else { Err(self.length()) }
    }

    fn config(&self) -> Result<ConfigHeader, MessageError> {
        let (header, _) = ConfigHeader::read_from_prefix(self.bytes).map_err(|_| self.length())?;
        if header.size as usize > MAX_CONFIG_LEN {
            return Err(self.number(header.size.into(), MAX_CONFIG_LEN as u64));
        }
        Ok(header)
    }

    fn inflight(&self) -> Result<Inflight, MessageError> {
        let mut inflight = Inflight::default();
        let (bytes, _) = inflight.as_mut_bytes().split_at_mut(INFLIGHT_PACKED_LEN);
        let sent = self.bytes.get(..INFLIGHT_PACKED_LEN).ok_or_else(|| self.length())?;
        bytes.copy_from_slice(sent);
        if inflight.num_queues > MAX_QUEUES {
            return Err(self.number(inflight.num_queues.into(), MAX_QUEUES.into()));
        }
        if inflight.queue_size > MAX_SIZE {
            return Err(self.number(inflight.queue_size.into(), MAX_SIZE.into()));
        }
        Ok(inflight)
    }
}

/// Length of the records of requests in flight that this describes.
#[must_use]
pub fn inflight_len(inflight: &Inflight) -> usize {
    inflight_region::len(inflight.queue_size).saturating_mul(inflight.num_queues.into())
}

/// A message with this payload.
pub fn message<T: IntoBytes + Immutable + KnownLayout>(request: u32, flags: u32, payload: &T) -> Vec<u8> {
    let payload = payload.as_bytes();
    let header = MessageHeader { request, flags: MESSAGE_VERSION | flags, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}

/// Largest number of virtqueues of a device.
pub const MAX_QUEUES: u16 = 128;
/// Largest size of a virtqueue: the most that front ends use.
pub const MAX_SIZE: u16 = 1024;
/// Largest number of memory regions.
pub const MAX_REGIONS: usize = 64;
/// Length of the longest payload in bytes: more than any message has.
pub const MAX_PAYLOAD: usize = 1024;

const _: () = assert!(MAX_SIZE <= MAX_QUEUE_SIZE);

#[cfg(test)]
mod tests {
    use super::*;

    fn parse<T: IntoBytes + Immutable>(
        request: FrontendRequest,
        payload: &T,
    ) -> Result<FrontendMessage, MessageError> {
        FrontendMessage::parse(request, payload.as_bytes())
    }

    #[test]
    fn a_header_is_that_of_a_request_of_version_1() {
        let header = |flags, size| message_header(&MessageHeader { request: 1, flags, size });
        assert_eq!(header(1, 8), Ok((8, false)));
        assert_eq!(header(9, 0), Ok((0, true)));
        assert_eq!(header(5, 0), Err(MessageError::Flags(5)));
        assert_eq!(header(2, 0), Err(MessageError::Flags(2)));
        assert!(matches!(header(1, 1 << 20), Err(MessageError::Length { .. })));
    }

    #[test]
    fn numbers_beyond_their_limits_are_refused() {
        let state = |index, num| VringState { index, num };
        assert_eq!(
            parse(FrontendRequest::SET_VRING_NUM, &state(127, 1024)),
            Ok(FrontendMessage::SetVringNum { index: 127, size: 1024 })
        );
        for (request, index, num) in [
            (FrontendRequest::SET_VRING_NUM, 128, 128),
            (FrontendRequest::SET_VRING_NUM, 0, 0),
            (FrontendRequest::SET_VRING_NUM, 0, 3),
            (FrontendRequest::SET_VRING_NUM, 0, 2048),
            (FrontendRequest::SET_VRING_BASE, 0, 65_536),
            (FrontendRequest::GET_VRING_BASE, u32::MAX, 0),
        ] {
            let parsed = parse(request, &state(index, num));
            assert!(matches!(parsed, Err(MessageError::Number { .. })), "{parsed:?}");
        }
        assert!(
            parse(FrontendRequest::GET_CONFIG, &ConfigHeader { offset: 0, size: 257, flags: 0 }).is_err()
        );
        assert!(
            parse(FrontendRequest::SET_INFLIGHT_FD, &Inflight { num_queues: 129, ..Inflight::default() })
                .is_err()
        );
        assert!(parse(FrontendRequest::SET_VRING_KICK, &0xff_u64).is_err());
        assert!(
            parse(FrontendRequest::SET_MEM_TABLE, &MemoryTableHeader { num_regions: 9, padding: 0 }).is_err()
        );
    }

    #[test]
    fn a_memory_table_has_the_regions_that_it_counts() {
        let region = MemoryRegion { guest_addr: 1, size: 2, user_addr: 3, mmap_offset: 4 };
        let header = MemoryTableHeader { num_regions: 1, padding: 0 };
        let mut payload = [header.as_bytes(), region.as_bytes()].concat();
        let parsed = FrontendMessage::parse(FrontendRequest::SET_MEM_TABLE, &payload);
        assert_eq!(parsed, Ok(FrontendMessage::SetMemTable(vec![region])));
        payload.extend([0; 32]);
        let parsed = FrontendMessage::parse(FrontendRequest::SET_MEM_TABLE, &payload);
        assert_eq!(parsed, Ok(FrontendMessage::SetMemTable(vec![region])));
        assert!(FrontendMessage::parse(FrontendRequest::SET_MEM_TABLE, &payload[..39]).is_err());
    }

    #[test]
    fn an_event_descriptor_may_be_absent() {
        assert_eq!(
            parse(FrontendRequest::SET_VRING_CALL, &0x103_u64),
            Ok(FrontendMessage::SetVringCall(VringFd { index: 3, has_fd: false }))
        );
    }

    #[test]
    fn whatever_a_front_end_sends_is_parsed_or_refused() {
        let bytes: Vec<u8> = (0..=255).cycle().take(MAX_PAYLOAD).collect();
        for request in 0..64 {
            for len in 0..MAX_PAYLOAD {
                let _ = FrontendMessage::parse(FrontendRequest(request), &bytes[..len]);
            }
        }
        assert_eq!(
            FrontendMessage::parse(FrontendRequest(99), &[]),
            Err(MessageError::Unsupported(FrontendRequest(99)))
        );
    }
}
