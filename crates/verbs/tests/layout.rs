//! The structures and numbers of `abi` are those of the installed headers of rdma-core: a C program
//! prints each size, offset and number.
//!
//! Without a C compiler or the headers the test prints a line that begins with `skipped: ` and
//! passes.
#![forbid(unsafe_code)]

use blockmux_verbs::abi::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::mem::{offset_of, size_of};
use std::process::Command;

/// C expressions with the values that they have here.
#[derive(Default)]
struct Expected(BTreeMap<String, u64>);

impl Expected {
    fn add(&mut self, expression: String, value: usize) {
        self.0.insert(expression, value as u64);
    }
}

/// The size of a field.
fn size_of_field<T, F>(_: impl Fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Expects offset and size of each field; a field of a C union has its path in C behind it.
macro_rules! fields {
    ($expected:ident, $name:ident { $($field:ident $(as $c:literal)?),* $(,)? }) => {$({
        let [c, ..] = [$($c,)? stringify!($field)];
        let name = concat!("struct ", stringify!($name));
        $expected.add(format!("offsetof({name}, {c})"), offset_of!($name, $field));
        let size = size_of_field(|whole: &$name| &whole.$field);
        $expected.add(format!("sizeof((({name} *)0)->{c})"), size);
    })*};
}

/// Expects all fields and the size of a structure.
macro_rules! structure {
    ($expected:ident, $name:ident { $($fields:tt)* }) => {
        fields!($expected, $name { $($fields)* });
        $expected.add(concat!("sizeof(struct ", stringify!($name), ")").to_owned(), size_of::<$name>());
    };
}

macro_rules! numbers {
    ($expected:ident, $($name:ident)*) => {$(
        $expected.add(stringify!($name).to_owned(), usize::try_from($name).unwrap());
    )*};
}

fn devices(expected: &mut Expected) {
    structure! { expected, ibv_device {
        node_type, transport_type, name, dev_name, dev_path, ibdev_path
    } }
    structure! { expected, ibv_context_ops {
        alloc_mw, bind_mw, dealloc_mw, poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv
    } }
    fields! { expected, ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors } }
    structure! { expected, ibv_device_attr {
        fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id,
        hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr,
        max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom,
        max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp,
        max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr,
        max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay,
        phys_port_cnt
    } }
    structure! { expected, ibv_port_attr {
        state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
        qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout,
        init_type_reply, active_width, active_speed, phys_state, link_layer, flags, port_cap_flags2
    } }
    structure! { expected, ibv_async_event { element, event_type } }
}

fn work(expected: &mut Expected) {
    structure! { expected, ibv_wc {
        wr_id, status, opcode, vendor_err, byte_len, invalidated_rkey, qp_num, src_qp, wc_flags,
        pkey_index, slid, sl, dlid_path_bits
    } }
    structure! { expected, ibv_mr { context, pd, addr, length, handle, lkey, rkey } }
    structure! { expected, ibv_mw { context, pd, rkey, handle, type_ as "type" } }
    structure! { expected, ibv_mw_bind_info { mr, addr, length, mw_access_flags } }
    structure! { expected, ibv_comp_channel { context, fd, refcnt } }
    fields! { expected, ibv_cq { context, channel, cq_context, handle, cqe } }
    fields! { expected, ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num } }
    structure! { expected, ibv_qp_cap {
        max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
    } }
    structure! { expected, ibv_qp_init_attr {
        qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all
    } }
    structure! { expected, ibv_sge { addr, length, lkey } }
    structure! { expected, ibv_send_wr {
        wr_id, next, sg_list, num_sge, opcode, send_flags, invalidate_rkey, wr, bind_mw,
        _remote_srqn as "qp_type.xrc.remote_srqn"
    } }
    let (rdma, bind) = (offset_of!(ibv_send_wr, wr), offset_of!(ibv_send_wr, bind_mw));
    for (field, offset) in [
        ("wr.rdma.remote_addr", rdma + offset_of!(ibv_send_wr_rdma, remote_addr)),
        ("wr.rdma.rkey", rdma + offset_of!(ibv_send_wr_rdma, rkey)),
        ("bind_mw.mw", bind + offset_of!(ibv_send_wr_bind_mw, mw)),
        ("bind_mw.rkey", bind + offset_of!(ibv_send_wr_bind_mw, rkey)),
        ("bind_mw.bind_info", bind + offset_of!(ibv_send_wr_bind_mw, bind_info)),
    ] {
        expected.add(format!("offsetof(struct ibv_send_wr, {field})"), offset);
    }
    structure! { expected, ibv_recv_wr { wr_id, next, sg_list, num_sge } }
}

fn connections(expected: &mut Expected) {
    structure! { expected, rdma_addr {
        src_storage, dst_storage, sgid as "addr.ibaddr.sgid", dgid as "addr.ibaddr.dgid",
        pkey as "addr.ibaddr.pkey"
    } }
    structure! { expected, rdma_route { addr, path_rec, num_paths } }
    structure! { expected, rdma_event_channel { fd } }
    fields! { expected, rdma_cm_id { verbs, channel, context, qp, route, ps, port_num } }
    structure! { expected, rdma_conn_param {
        private_data, private_data_len, responder_resources, initiator_depth, flow_control,
        retry_count, rnr_retry_count, srq, qp_num
    } }
    fields! { expected, rdma_cm_event { id, listen_id, event, status, conn as "param.conn" } }
}

fn numbers(expected: &mut Expected) {
    numbers!(
        expected,
        IBV_SYSFS_NAME_MAX IBV_SYSFS_PATH_MAX IBV_TRANSPORT_IB IBV_TRANSPORT_IWARP
        IBV_DEVICE_MEM_WINDOW IBV_DEVICE_MEM_WINDOW_TYPE_2A IBV_DEVICE_MEM_WINDOW_TYPE_2B IBV_PORT_ACTIVE
        IBV_EVENT_CQ_ERR IBV_EVENT_QP_FATAL IBV_EVENT_QP_REQ_ERR IBV_EVENT_QP_ACCESS_ERR
        IBV_EVENT_COMM_EST IBV_EVENT_DEVICE_FATAL IBV_EVENT_PORT_ACTIVE IBV_EVENT_PORT_ERR
        IBV_EVENT_QP_LAST_WQE_REACHED
        IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_PROT_ERR IBV_WC_WR_FLUSH_ERR
        IBV_WC_MW_BIND_ERR IBV_WC_REM_INV_REQ_ERR IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR
        IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR
        IBV_WC_SEND IBV_WC_RDMA_WRITE IBV_WC_RDMA_READ IBV_WC_BIND_MW IBV_WC_LOCAL_INV IBV_WC_RECV
        IBV_WC_IP_CSUM_OK IBV_WC_WITH_INV
        IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ IBV_ACCESS_MW_BIND
        IBV_MW_TYPE_2 IBV_QPT_RC
        IBV_WR_RDMA_WRITE IBV_WR_SEND IBV_WR_RDMA_READ IBV_WR_LOCAL_INV IBV_WR_BIND_MW
        IBV_WR_SEND_WITH_INV
        IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_SOLICITED IBV_SEND_INLINE
        RDMA_PS_TCP RDMA_OPTION_ID RDMA_OPTION_ID_AFONLY
        RDMA_CM_EVENT_ADDR_RESOLVED RDMA_CM_EVENT_ADDR_ERROR RDMA_CM_EVENT_ROUTE_RESOLVED
        RDMA_CM_EVENT_ROUTE_ERROR RDMA_CM_EVENT_CONNECT_REQUEST RDMA_CM_EVENT_CONNECT_RESPONSE
        RDMA_CM_EVENT_CONNECT_ERROR RDMA_CM_EVENT_UNREACHABLE RDMA_CM_EVENT_REJECTED
        RDMA_CM_EVENT_ESTABLISHED RDMA_CM_EVENT_DISCONNECTED RDMA_CM_EVENT_DEVICE_REMOVAL
        RDMA_CM_EVENT_ADDR_CHANGE RDMA_CM_EVENT_TIMEWAIT_EXIT
    );
}

/// Compiles and runs a C program that prints each expression; `Err` says why that is not possible
/// here.
fn values_in_c(expressions: &Expected) -> Result<BTreeMap<String, u64>, String> {
    let mut source = "#include <stddef.h>\n#include <stdio.h>\n#include <rdma/rdma_cma.h>\n".to_owned();
    source += "#include <infiniband/verbs.h>\nint main(void) {\n";
    for expression in expressions.0.keys() {
        writeln!(source, "printf(\"%llu\\t%s\\n\", (unsigned long long)({expression}), \"{expression}\");")
            .unwrap();
    }
    source += "return 0;\n}\n";
    let directory = tempfile::tempdir().unwrap();
    let (file, program) = (directory.path().join("layout.c"), directory.path().join("layout"));
    fs::write(&file, source).unwrap();
    let check = ["-fsyntax-only", "-include", "rdma/rdma_cma.h", "-xc", "/dev/null"];
    let headers =
        Command::new("cc").args(check).output().map_err(|error| format!("no C compiler: cc: {error}"))?;
    if !headers.status.success() {
        return Err("no headers of rdma-core, Debian packages libibverbs-dev and librdmacm-dev".to_owned());
    }
    // With the headers at hand, a field or a number that they lack is a failure.
    let compiled = Command::new("cc").arg("-o").arg(&program).arg(&file).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success());
    let lines = String::from_utf8(output.stdout).unwrap();
    let values = lines.lines().map(|line| {
        let (value, expression) = line.split_once('\t').unwrap();
        (expression.to_owned(), value.parse().unwrap())
    });
    Ok(values.collect())
}

#[test]
fn structures_and_numbers_are_those_of_the_headers() {
    let mut expected = Expected::default();
    [devices, work, connections, numbers].into_iter().for_each(|part| part(&mut expected));
    assert!(expected.0.len() > 300, "{}", expected.0.len());
    match values_in_c(&expected) {
        Ok(found) => {
            let wrong: Vec<_> = expected
                .0
                .iter()
                .filter(|(expression, value)| found.get(*expression) != Some(value))
                .map(|(expression, value)| format!("{expression}: {value}, in C {:?}", found.get(expression)))
                .collect();
            assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        }
        Err(why) => println!("skipped: {why}"),
    }
}
