//! Sends commands, with their data in the capsule if that is short, and data that the controller
//! requested.

use super::link::{TcpHostLink, common};
use crate::digest;
use crate::fabrics::host::{Commands, DataTransfer, NvmeRequest};
use crate::slots::SlotKey;
use blockmux_volume::SgList;
use blockmux_wire::nvme::{PSDT_SGL, SglDescriptor};
use blockmux_wire::nvmeof::tcp::{
    CAPSULE_CMD_LEN, CapsuleCmd, CommonHeader, DATA_LEN, DIGEST_LEN, Data, FLAG_DDGST, FLAG_HDGST, FLAG_LAST,
    PduType,
};
use zerocopy::{FromZeros, IntoBytes};

impl TcpHostLink {
    /// Sends a command, with its data if that fits the capsule.
    #[inline]
    pub(super) fn send_command(&mut self, request: &NvmeRequest, commands: &mut impl Commands) {
        let mut sqe = request.command;
        sqe.cid = request.key.narrow().into();
        sqe.flags |= PSDT_SGL;
        let mut data_len = 0;
        sqe.dptr = match request.transfer {
            DataTransfer::Nothing => SglDescriptor::transport(0),
            DataTransfer::In(len) => SglDescriptor::transport(len),
            DataTransfer::Out(len) if len <= self.parameters.in_capsule => {
                data_len = len;
                SglDescriptor::in_capsule(0, len)
            }
            DataTransfer::Out(len) => SglDescriptor::transport(len),
        };
        let common = self.common(PduType::CAPSULE_CMD, CAPSULE_CMD_LEN, data_len as usize);
        let capsule = CapsuleCmd { common, sqe };
        self.push_header(capsule.as_bytes(), &common);
        if data_len > 0 {
            // The controller must not request this data again.
            if let Some((progress, _)) = commands.transport(request.key)
                && progress.moved.add(0, data_len).is_err()
            {
                debug_assert!(false, "a fresh command has moved nothing");
            }
            self.push_data(request.key, 0, data_len, commands);
        }
    }

    /// Sends a command's data from `from` up to `end`, in H2CData PDUs of at most MAXH2CDATA.
    pub(super) fn send_data(
        &mut self,
        key: SlotKey,
        ttag: u16,
        from: u32,
        end: u32,
        commands: &mut impl Commands,
    ) {
        let mut at = from;
        while at < end {
            let len = end.saturating_sub(at).min(self.parameters.max_h2c_data);
            let next = at.saturating_add(len);
            let mut common = self.common(PduType::H2C_DATA, DATA_LEN, len as usize);
            if next == end {
                common.flags |= FLAG_LAST;
            }
            let data = Data {
                common,
                cccid: key.narrow().into(),
                ttag: ttag.into(),
                datao: at.into(),
                datal: len.into(),
                ..Data::new_zeroed()
            };
            self.push_header(data.as_bytes(), &common);
            self.push_data(key, at, len, commands);
            at = next;
        }
    }

    /// The common header of a PDU with a header of `hlen` bytes and `data_len` bytes of data.
    #[inline]
    fn common(&self, kind: PduType, hlen: usize, data_len: usize) -> CommonHeader {
        let digests = self.parameters.digests;
        let mut common = common(kind, hlen);
        let mut end = hlen;
        if digests.header {
            common.flags |= FLAG_HDGST;
            end = end.saturating_add(DIGEST_LEN);
        }
        if data_len > 0 {
            // At most 72 bytes, a digest, and padding to 128 bytes.
            end = end.next_multiple_of(self.parameters.alignment.max(4));
            common.pdo = end as u8;
            end = end.saturating_add(data_len);
            if digests.data {
                common.flags |= FLAG_DDGST;
                end = end.saturating_add(DIGEST_LEN);
            }
        }
        common.plen = (end as u32).into();
        common
    }

    /// Sends a header with its digest, and padding up to the data.
    #[inline]
    fn push_header(&mut self, header: &[u8], common: &CommonHeader) {
        self.outbox.push_head(header);
        let mut len = header.len();
        if self.parameters.digests.header {
            self.outbox.push_head(&digest::of(header));
            len = len.saturating_add(DIGEST_LEN);
        }
        let padding = usize::from(common.pdo).saturating_sub(len);
        if padding > 0 {
            self.outbox.push_head([0; 256].get(..padding).unwrap_or_default());
        }
    }

    /// Sends part of a command's data, by reference as far as the data digest allows.
    #[inline]
    fn push_data(&mut self, key: SlotKey, from: u32, len: u32, commands: &mut impl Commands) {
        let nothing = SgList::default();
        let (data, base) = commands.data_out(key).unwrap_or((&nothing, 0));
        let (from, len) = (base.saturating_add(from as usize), len as usize);
        if !self.parameters.digests.data {
            return self.outbox.push_part(data, from, len);
        }
        let crc = digest::push(&mut self.outbox, &self.pool, &data.slice(from, len));
        self.outbox.push_head(&crc.to_le_bytes());
    }
}
