//! A scripted target, whose bytes a driver delivers in pieces of any size.

use crate::digest;
use crate::driver::session::{Initiator, ProtocolError, RetryRules};
use crate::iscsi::client::{
    BurstSize, IscsiInitiatorConfig, IscsiInitiatorSession, SessionPurpose, default_proposal,
};
use crate::iscsi::login::operational::OperationalParameters;
use crate::iscsi::name::Name;
use crate::scsi::{Lun, ScsiStatus, Sense};
use crate::testing::Driver;
use blockmux_volume::{Op, Pool, Seg, SgList};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24, padding};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

pub(super) const TARGET: &str = "iqn.2026-11.com.example:disk";
pub(super) const INITIATOR: &str = "iqn.2026-11.com.example:me";

/// A sent PDU: header and data segment.
#[derive(Debug, Clone)]
pub(super) struct InitiatorPdu {
    pub(super) bhs: Bhs,
    pub(super) data: Vec<u8>,
}

impl InitiatorPdu {
    pub(super) fn as_a<T: FromBytes>(&self) -> T {
        T::read_from_bytes(self.bhs.as_bytes()).unwrap()
    }

    pub(super) fn tag(&self) -> u32 {
        self.bhs.initiator_task_tag.get()
    }

    pub(super) fn cdb(&self) -> [u8; 16] {
        self.as_a::<ScsiCommand>().cdb
    }
}

/// A session, its driver, and the scripted target.
pub(super) struct ScriptedClient {
    driver: Driver<IscsiInitiatorSession>,
    /// Sequence numbers of the scripted target.
    pub(super) stat_sn: u32,
    pub(super) exp_cmd_sn: u32,
    pub(super) window: u32,
    /// Data digests are enabled.
    pub(super) has_digests: bool,
    connection: usize,
    /// StatSN and unprocessed bytes of the connections that are not selected.
    others: BTreeMap<usize, (u32, Vec<u8>)>,
}

pub(super) fn config(proposal: OperationalParameters) -> IscsiInitiatorConfig {
    IscsiInitiatorConfig {
        initiator: Name::new(INITIATOR).unwrap(),
        target: Name::new(TARGET).unwrap(),
        lun: Lun::new(0),
        purpose: SessionPurpose::Use,
        chap: None,
        proposal,
        isid: [0x80, 1, 2, 3, 0, 0],
        burst: BurstSize::default(),
    }
}

impl ScriptedClient {
    pub(super) fn new(config: IscsiInitiatorConfig) -> ScriptedClient {
        let session = IscsiInitiatorSession::new(config, Pool::new(64 << 20), [5; 32], Instant::now());
        ScriptedClient {
            driver: Driver::of(session, usize::MAX),
            stat_sn: 1,
            exp_cmd_sn: 1,
            window: 64,
            has_digests: false,
            connection: 0,
            others: BTreeMap::new(),
        }
    }

    /// Selects a connection.
    pub(super) fn select(&mut self, connection: usize) {
        let (stat_sn, unread) = self.others.remove(&connection).unwrap_or((1, Vec::new()));
        let before = (
            std::mem::replace(&mut self.stat_sn, stat_sn),
            std::mem::replace(&mut self.driver.unread, unread),
        );
        self.others.insert(std::mem::replace(&mut self.connection, connection), before);
        self.driver.connection = connection;
    }

    /// A session that has logged in with these answers to its proposal, before the bring-up.
    pub(super) fn logged_in(answers: &str) -> ScriptedClient {
        ScriptedClient::logged_in_with(default_proposal(), answers)
    }

    /// A session with this proposal that has logged in with the scripted `answers`.
    pub(super) fn logged_in_with(proposal: OperationalParameters, answers: &str) -> ScriptedClient {
        ScriptedClient::new(config(proposal)).log_in(answers)
    }

    /// A session with this purpose that has logged in with the scripted `answers`.
    pub(super) fn logged_in_for(purpose: SessionPurpose, answers: &str) -> ScriptedClient {
        ScriptedClient::new(IscsiInitiatorConfig { purpose, ..config(default_proposal()) }).log_in(answers)
    }

    /// A session with or without other paths that has logged in.
    pub(super) fn logged_in_on_paths(has_others: bool, answers: &str) -> ScriptedClient {
        let mut client = ScriptedClient::new(config(default_proposal()));
        if has_others {
            client.driver.session = client
                .driver
                .session
                .with_retries(RetryRules { has_other_paths: true, ..RetryRules::default() });
        }
        client.log_in(answers)
    }

    fn log_in(mut self, answers: &str) -> ScriptedClient {
        let client = &mut self;
        let [first] = client.sent().try_into().unwrap();
        assert_eq!(first.bhs.opcode(), IscsiOpcode::LOGIN_REQUEST);
        client
            .login_response(0x81, LoginStatus::SUCCESS, b"AuthMethod=None\0TargetPortalGroupTag=1\0")
            .unwrap();
        let [second] = client.sent().try_into().unwrap();
        assert_eq!(second.bhs.flags, 0x87);
        client.login_response(0x87, LoginStatus::SUCCESS, answers.as_bytes()).unwrap();
        self
    }

    /// A ready session with a unit of `blocks` blocks of 512 bytes and all features.
    pub(super) fn ready(answers: &str, blocks: u64) -> ScriptedClient {
        let mut client = ScriptedClient::logged_in(answers);
        client.bring_up(&Unit { blocks, ..Unit::default() });
        assert!(client.session.is_ready(), "{:?}", client.session.refused());
        client
    }

    /// Answers the bring-up of the unit.
    pub(super) fn bring_up(&mut self, unit: &Unit) {
        loop {
            let commands = self.sent();
            if commands.is_empty() || commands.iter().any(|pdu| pdu.bhs.opcode() != IscsiOpcode::SCSI_COMMAND)
            {
                return;
            }
            commands.iter().for_each(|command| self.answer(unit, command));
        }
    }

    /// Answers one command for the unit.
    pub(super) fn answer(&mut self, unit: &Unit, command: &InitiatorPdu) {
        match unit.answer(&command.cdb()) {
            Ok(data) if data.is_empty() => self.status(command, ScsiStatus::GOOD, None),
            Ok(data) => self.data(command, &data),
            Err(sense) => self.status(command, ScsiStatus::CHECK_CONDITION, Some(sense)),
        }
    }

    pub(super) fn login_response(
        &mut self,
        flags: u8,
        status: LoginStatus,
        text: &[u8],
    ) -> Result<(), ProtocolError> {
        let response = IscsiLoginResponse {
            opcode: IscsiOpcode::LOGIN_RESPONSE.0,
            flags,
            tsih: 7.into(),
            initiator_task_tag: 1.into(),
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: self.exp_cmd_sn.into(),
            max_cmd_sn: (self.exp_cmd_sn + self.window - 1).into(),
            status: status.0.into(),
            ..IscsiLoginResponse::new_zeroed()
        };
        self.send(&response, text)
    }

    /// Sends a command's data-in with good status, in one PDU.
    pub(super) fn data(&mut self, command: &InitiatorPdu, data: &[u8]) {
        let expected = command.as_a::<ScsiCommand>().expected_data_transfer_length.get() as usize;
        let data = &data[..data.len().min(expected)];
        let residual = expected - data.len();
        let flags = FLAG_FINAL | FLAG_STATUS | if residual > 0 { FLAG_UNDERFLOW } else { 0 };
        let data_in =
            DataIn { residual_count: (residual as u32).into(), ..self.data_in(command, flags, 0, 0) };
        self.exp_cmd_sn += 1;
        self.send(&data_in, data).unwrap();
    }

    /// A Data-In header.
    pub(super) fn data_in(&mut self, command: &InitiatorPdu, flags: u8, data_sn: u32, offset: u32) -> DataIn {
        let stat_sn = if flags & FLAG_STATUS != 0 { self.next_stat_sn() } else { 0 };
        DataIn {
            opcode: IscsiOpcode::DATA_IN.0,
            flags,
            initiator_task_tag: command.tag().into(),
            target_transfer_tag: RESERVED_TAG.into(),
            stat_sn: stat_sn.into(),
            exp_cmd_sn: self.exp_cmd_sn.into(),
            max_cmd_sn: (self.exp_cmd_sn + self.window - 1).into(),
            data_sn: data_sn.into(),
            buffer_offset: offset.into(),
            ..DataIn::new_zeroed()
        }
    }

    /// Sends a response without data.
    pub(super) fn status(&mut self, command: &InitiatorPdu, status: ScsiStatus, sense: Option<Sense>) {
        self.exp_cmd_sn += 1;
        let response = self.response(command, status);
        let sense = sense.map(|sense| sense.to_bytes().to_vec());
        let data = sense.map(|sense| [&(sense.len() as u16).to_be_bytes()[..], &sense].concat());
        self.send(&response, &data.unwrap_or_default()).unwrap();
    }

    pub(super) fn response(&mut self, command: &InitiatorPdu, status: ScsiStatus) -> ScsiResponse {
        ScsiResponse {
            opcode: IscsiOpcode::SCSI_RESPONSE.0,
            flags: FLAG_FINAL,
            status: status.0,
            initiator_task_tag: command.tag().into(),
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: self.exp_cmd_sn.into(),
            max_cmd_sn: (self.exp_cmd_sn + self.window - 1).into(),
            ..ScsiResponse::new_zeroed()
        }
    }

    pub(super) fn r2t(
        &mut self,
        command: &InitiatorPdu,
        sn: u32,
        offset: u32,
        len: u32,
    ) -> Result<(), ProtocolError> {
        let r2t = IscsiR2t {
            opcode: IscsiOpcode::R2T.0,
            flags: FLAG_FINAL,
            initiator_task_tag: command.tag().into(),
            target_transfer_tag: (0x100 + sn).into(),
            stat_sn: self.stat_sn.into(),
            exp_cmd_sn: self.exp_cmd_sn.into(),
            max_cmd_sn: (self.exp_cmd_sn + self.window - 1).into(),
            r2t_sn: sn.into(),
            buffer_offset: offset.into(),
            desired_data_transfer_length: len.into(),
            ..IscsiR2t::new_zeroed()
        };
        self.send(&r2t, &[])
    }

    pub(super) fn next_stat_sn(&mut self) -> u32 {
        self.stat_sn += 1;
        self.stat_sn - 1
    }

    /// Sends an asynchronous message about the unit, with the third parameter in seconds.
    pub(super) fn event(
        &mut self,
        event: AsyncEvent,
        seconds: u16,
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        let message = AsyncMessage {
            opcode: IscsiOpcode::ASYNC_MESSAGE.0,
            flags: FLAG_FINAL,
            initiator_task_tag: RESERVED_TAG.into(),
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: self.exp_cmd_sn.into(),
            max_cmd_sn: (self.exp_cmd_sn + 9).into(),
            async_event: event.0,
            // Time2Wait of a connection drop.
            parameter2: (seconds + 1).into(),
            parameter3: seconds.into(),
            ..AsyncMessage::new_zeroed()
        };
        self.send(&message, data)
    }

    /// Sends a task management function response.
    pub(super) fn answer_task(
        &mut self,
        request: &TaskManagementFunctionRequest,
        response: FunctionResponse,
    ) -> Result<(), ProtocolError> {
        let answer = TaskManagementFunctionResponse {
            opcode: IscsiOpcode::TASK_MANAGEMENT_RESPONSE.0,
            flags: FLAG_FINAL,
            response: response.0,
            initiator_task_tag: request.initiator_task_tag,
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: request.cmd_sn,
            max_cmd_sn: (request.cmd_sn.get() + 63).into(),
            ..TaskManagementFunctionResponse::new_zeroed()
        };
        self.send(&answer, &[])
    }

    /// Sends a PDU of the target.
    pub(super) fn send(
        &mut self,
        header: &(impl IntoBytes + Immutable),
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        let mut bhs = Bhs::read_from_bytes(header.as_bytes()).unwrap();
        bhs.data_segment_length = U24::new(data.len() as u32);
        let mut bytes = [bhs.as_bytes(), data, &[0; 3][..padding(data.len())]].concat();
        if self.has_digests && !data.is_empty() {
            bytes.extend(digest::of(&bytes[BHS_LEN..]));
        }
        self.feed(&bytes)
    }

    /// Sends a PDU with a damaged data segment.
    pub(super) fn send_damaged(
        &mut self,
        header: &(impl IntoBytes + Immutable),
        data: &[u8],
    ) -> Result<(), ProtocolError> {
        let mut bhs = Bhs::read_from_bytes(header.as_bytes()).unwrap();
        bhs.data_segment_length = U24::new(data.len() as u32);
        let mut bytes = [bhs.as_bytes(), data, &[0; 3][..padding(data.len())]].concat();
        let digest = digest::of(&bytes[BHS_LEN..]);
        bytes[BHS_LEN + data.len() / 2] ^= 0x10;
        self.feed(&[&bytes[..], &digest].concat())
    }

    /// Drops unread bytes, for a new connection.
    pub(super) fn forget_unread(&mut self) {
        self.driver.unread.clear();
    }

    /// The PDUs that the session has sent.
    pub(super) fn sent(&mut self) -> Vec<InitiatorPdu> {
        pdus(&self.driver.sent(), self.has_digests)
    }

    /// Expects a single command from the session.
    pub(super) fn command(&mut self) -> InitiatorPdu {
        let [command] = self.sent().try_into().unwrap();
        assert_eq!(command.bhs.opcode(), IscsiOpcode::SCSI_COMMAND);
        command
    }

    pub(super) fn write(&mut self, tag: u64, offset: u64, data: &[u8]) {
        self.submit(tag, Op::Write { fua: false }, offset, data.len() as u64, Some(list(data)));
    }
}

impl Deref for ScriptedClient {
    type Target = Driver<IscsiInitiatorSession>;

    fn deref(&self) -> &Driver<IscsiInitiatorSession> {
        &self.driver
    }
}

impl DerefMut for ScriptedClient {
    fn deref_mut(&mut self) -> &mut Driver<IscsiInitiatorSession> {
        &mut self.driver
    }
}

/// Properties of a unit that answers automatically.
pub(super) struct Unit {
    pub(super) blocks: u64,
    pub(super) block_len: u32,
    /// READ CAPACITY (16) is supported.
    pub(super) is_long: bool,
    pub(super) is_thin: bool,
    /// Byte 2 of the mode parameter header.
    pub(super) device_specific: u8,
    pub(super) write_cache: bool,
    pub(super) max_transfer: u32,
    pub(super) max_unmap: u32,
    /// The unit has target port groups and is accessed through group 1.
    pub(super) is_asymmetric: bool,
}

impl Default for Unit {
    fn default() -> Unit {
        Unit {
            blocks: 1 << 20,
            block_len: 512,
            is_long: true,
            is_thin: true,
            device_specific: 0x10,
            write_cache: true,
            max_transfer: 0,
            max_unmap: u32::MAX,
            is_asymmetric: false,
        }
    }
}

impl Unit {
    fn answer(&self, cdb: &[u8; 16]) -> Result<Vec<u8>, Sense> {
        use blockmux_wire::scsi::sense::Asc;
        let page =
            |code: u8, body: &[u8]| Ok([&[0, code][..], &(body.len() as u16).to_be_bytes(), body].concat());
        match (cdb[0], cdb[1], cdb[2]) {
            (0x00, ..) => Ok(Vec::new()),
            (0xa0, ..) => Ok([&16u32.to_be_bytes()[..], &[0; 12], &[0, 1, 0, 0, 0, 0, 0, 0]].concat()),
            (0x12, 0, _) => {
                let groups = if self.is_asymmetric { 0x10 } else { 0 };
                Ok([&[0, 0, 6, 2, 91, groups, 0, 2][..], b"MAKER   A DISK          1.0 ", &[0; 60]].concat())
            }
            (0x12, _, 0x00) => page(0, &[0, 0x80, 0x83, 0xb0, 0xb1, 0xb2]),
            (0x12, _, 0x80) => page(0x80, b"  serial "),
            (0x12, _, 0x83) => page(
                0x83,
                &[&[2, 1, 0, 2, b'a', b'b', 0x51, 0x95, 0, 4, 0, 0, 0, 1, 1, 3, 0, 8][..], &[0x60; 8]]
                    .concat(),
            ),
            (0xa3, 0x0a, _) => Ok(vec![0, 0, 0, 8, 0, 0x0f, 0, 1, 0, 0, 0, 0]),
            (0x12, _, 0xb0) => {
                let mut limits = vec![0; 60];
                limits[4..8].copy_from_slice(&self.max_transfer.to_be_bytes());
                limits[16..20].copy_from_slice(&self.max_unmap.to_be_bytes());
                limits[20..24].copy_from_slice(&1u32.to_be_bytes());
                limits[24..28].copy_from_slice(&8u32.to_be_bytes());
                page(0xb0, &limits)
            }
            (0x12, _, 0xb1) => page(0xb1, &[0, 1]),
            (0x12, _, 0xb2) => page(0xb2, &[0, if self.is_thin { 0xe4 } else { 0 }, 2, 0]),
            (0x9e, 0x10, _) if self.is_long => {
                let provisioning = if self.is_thin { 0xc0 } else { 0 };
                let tail = [&[0, 3, provisioning, 0][..], &[0; 16]].concat();
                Ok([&(self.blocks - 1).to_be_bytes()[..], &self.block_len.to_be_bytes(), &tail].concat())
            }
            (0x25, ..) => {
                Ok([((self.blocks - 1) as u32).to_be_bytes(), self.block_len.to_be_bytes()].concat())
            }
            (0x1a, _, 8) => {
                let flags = if self.write_cache { 4 } else { 0 };
                Ok([&[23, 0, self.device_specific, 0, 8, 18, flags][..], &[0; 17]].concat())
            }
            _ => Err(Sense::illegal(Asc::INVALID_COMMAND_OPERATION_CODE)),
        }
    }
}

/// Parses PDUs with or without data digests.
pub(super) fn pdus(mut bytes: &[u8], has_digests: bool) -> Vec<InitiatorPdu> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let (bhs, rest) = Bhs::read_from_prefix(bytes).unwrap();
        let len = bhs.data_segment_length.get() as usize;
        all.push(InitiatorPdu { bhs, data: rest[..len].to_vec() });
        let digest = if has_digests && len > 0 { 4 } else { 0 };
        assert!(digest == 0 || digest::of(&rest[..len + padding(len)]) == rest[len + padding(len)..][..4]);
        bytes = &rest[len + padding(len) + digest..];
    }
    all
}

/// Runs a trace with its bytes split at every relevant position.
pub(super) fn at_every_split(trace: impl Fn(usize)) {
    (1..=BHS_LEN + 4).for_each(&trace);
    trace(usize::MAX);
}

pub(super) fn list(bytes: &[u8]) -> SgList {
    SgList::one(Seg::from_slice(bytes))
}

pub(super) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 251) as u8).collect()
}
