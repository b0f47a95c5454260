//! Tests of the reports of deadlocked kernels: what each warp waits for, and which warps could end the wait.

use flashcore_emu::{Buffer, HazardKind, Options, run};
use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, Launch};

/// The message for a kernel of `warps` warps. `%r0` is the thread, `%r1` the warp, `%r2` an mbarrier. The
/// body begins at line 12.
fn deadlock(warps: u32, body: &str) -> String {
    let text = format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
         .reg .pred %p<8>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n.shared .align 8 .b64 bars[4];\n\
         mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5;\n\
         mov.u32 %r2, bars;\n{body}\nret;\n}}\n"
    );
    let kernel = Kernel {
        module: ptx::parse(&text)
            .unwrap_or_else(|e| panic!("{e}"))
            .verify()
            .unwrap_or_else(|e| panic!("{e}")),
        entry: "k".into(),
        launch: Launch::new(Dim3(1, 1, 1), Dim3(32 * warps, 1, 1)),
        buffers: vec![BufferSpec { name: "out".into(), bytes: 4, access: Access::ReadWrite }],
        tensor_maps: Vec::new(),
        args: vec![Arg::Buffer { index: 0, offset: 0 }],
    };
    let report = run(&kernel, &mut [&mut Buffer::from_bytes(&[0; 4])], &Options::default()).expect("a run");
    let found = report.hazards.into_iter().find(|h| h.kind == HazardKind::Deadlock);
    found.expect("a deadlock").message
}

#[test]
fn barriers_in_opposite_order_are_a_circle() {
    let message = deadlock(
        2,
        "setp.eq.u32 %p0, %r1, 0;
         @%p0 bra FIRST;
         bar.sync 1, 64;
         bar.sync 2, 64;
         bra DONE;
         FIRST:
         bar.sync 2, 64;
         bar.sync 1, 64;
         DONE:",
    );
    assert_eq!(
        message,
        "warp 0 waits at line 18 for barrier 2, where 32 of 64 threads have arrived; \
         warp 1 waits at line 14 for barrier 1, where 32 of 64 threads have arrived; \
         the cycle: warp 0 (line 18, barrier 2) → warp 1 (line 14, barrier 1) → warp 0"
    );
}

/// The barrier numbers are in registers, as in code of ptxas and of programmers. A further warp waits for a
/// warp of the cycle.
#[test]
fn a_circle_of_three_leaves_the_bystander_out() {
    let message = deadlock(
        4,
        "setp.eq.u32 %p0, %r1, 3;
         @%p0 bra BYSTANDER;
         add.u32 %r3, %r1, 1;
         add.u32 %r4, %r1, 2;
         setp.eq.u32 %p1, %r1, 2;
         @%p1 mov.u32 %r4, 1;
         bar.sync %r3, 64;
         bar.arrive %r4, 64;
         bar.arrive 8, 64;
         ret;
         BYSTANDER:
         bar.sync 8, 64;",
    );
    assert!(message.starts_with("warp 0 waits at line 18 for barrier 1, where 32 of 64"), "{message}");
    assert!(
        message.ends_with(
            "; warp 3 waits at line 23 for barrier 8, where 32 of 64 threads have arrived; the cycle: \
             warp 0 (line 18, barrier 1) → warp 2 (line 18, barrier 3) → warp 1 (line 18, barrier 2) → warp 0"
        ),
        "{message}"
    );
}

#[test]
fn warps_that_have_exited_are_named() {
    let message = deadlock(
        4,
        "setp.ge.u32 %p0, %r1, 2;
         @%p0 exit;
         bar.sync 1, 128;",
    );
    assert_eq!(
        message,
        "warps 0 and 1 wait at line 14 for barrier 1, where 64 of 128 threads have arrived, \
         and no running warp can end the wait: warps 2 and 3 have exited"
    );
}

/// The producer waits for a free stage and the consumer for a full one. Each arrives only after its own wait.
#[test]
fn a_pipeline_that_nobody_primes_is_a_circle_of_mbarriers() {
    let message = deadlock(
        2,
        "setp.eq.u32 %p0, %r0, 0;
         @%p0 mbarrier.init.shared::cta.b64 [%r2], 32;
         @%p0 mbarrier.init.shared::cta.b64 [%r2+8], 32;
         bar.sync 0;
         setp.eq.u32 %p1, %r1, 0;
         @%p1 bra PRODUCER;
         FULL: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
         @!%p2 bra FULL;
         mbarrier.arrive.shared::cta.b64 _, [%r2+8];
         ret;
         PRODUCER:
         FREE: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2+8], 0;
         @!%p2 bra FREE;
         mbarrier.arrive.shared::cta.b64 _, [%r2];",
    );
    assert_eq!(
        message,
        "warp 0 waits at line 23 for the mbarrier bars[0x8], phase 0: 32 of 32 arrivals and 0 bytes are missing, \
         0 copies are on their way; warp 1 waits at line 18 for the mbarrier bars[0x0], phase 0: 32 of 32 arrivals \
         and 0 bytes are missing, 0 copies are on their way; the cycle: warp 0 (line 23, mbarrier bars[0x8]) → \
         warp 1 (line 18, mbarrier bars[0x0]) → warp 0"
    );
}

#[test]
fn bytes_that_never_come_are_counted() {
    let message = deadlock(
        2,
        "setp.eq.u32 %p0, %r0, 0;
         @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
         @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4096;
         bar.sync 0;
         setp.eq.u32 %p1, %r1, 0;
         @%p1 exit;
         FULL: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
         @!%p2 bra FULL;",
    );
    assert_eq!(
        message,
        "warp 1 waits at line 18 for the mbarrier bars[0x0], phase 0: 0 of 1 arrivals and 4096 bytes are missing, \
         0 copies are on their way, and no running warp can end the wait: warp 0 has exited"
    );
}
