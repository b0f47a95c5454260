//! Tests of launches that are rejected before they run, and of the counters of a run.

use flashcore_emu::{Buffer, EmuError, Emulator, Options, Report, run};
use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, Launch, Machine};

/// A kernel with one buffer of 4096 bytes, which is also its argument.
fn kernel(body: &str) -> Kernel {
    let text = format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out)\n.maxntid 256\n{{\n\
         .reg .pred %p<8>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n.reg .f32 %f<8>;\n\
         .shared .align 16 .b8 smem[4096];\n{body}\nret;\n}}\n"
    );
    Kernel {
        module: ptx::parse(&text).unwrap_or_else(|e| panic!("{e}")).assume_verified(),
        entry: "k".into(),
        launch: Launch::new(Dim3(1, 1, 1), Dim3(64, 1, 1)),
        buffers: vec![BufferSpec { name: "out".into(), bytes: 4096, access: Access::ReadWrite }],
        tensor_maps: Vec::new(),
        args: vec![Arg::Buffer { index: 0, offset: 0 }],
    }
}

fn launch(kernel: &Kernel, options: &Options) -> Result<Report, EmuError> {
    run(kernel, &mut [&mut Buffer::from_bytes(&[0; 4096])], options)
}

fn refused(change: impl FnOnce(&mut Kernel)) -> String {
    let mut kernel = kernel("");
    change(&mut kernel);
    launch(&kernel, &Options::default()).expect_err("a refusal").to_string()
}

#[test]
fn contracts_that_do_not_fit_are_refused() {
    assert!(refused(|k| k.entry = "other".into()).contains("no entry `other`; its entries: "));
    assert!(refused(|k| k.args.clear()).contains("the launch contract gives 0 arguments"));
    assert!(refused(|k| k.args[0] = Arg::U32(1)).contains("has 4 bytes, but parameter `out` has 8"));
    assert!(refused(|k| k.args[0] = Arg::Buffer { index: 3, offset: 0 }).contains("names buffer 3"));
    assert!(refused(|k| k.buffers.clear()).contains("names buffer 0"));
    assert!(refused(|k| k.buffers[0].bytes = 4097).contains("has 4096 bytes, but 4097 are needed"));
    assert!(refused(|k| k.launch.block = Dim3(0, 1, 1)).contains("1 to 1024 threads"));
    assert!(refused(|k| k.launch.block = Dim3(1025, 1, 1)).contains("1 to 1024 threads"));
    assert!(refused(|k| k.launch.block = Dim3(512, 1, 1)).contains(".maxntid"));
    assert!(refused(|k| k.launch.grid = Dim3(1, 0, 1)).contains("for grid: expected 1 to 2147483647"));
    assert!(refused(|k| k.launch.cluster = Dim3(2, 1, 1)).contains("one CTA"));
    assert!(refused(|k| k.launch.dynamic_shared = 200_000).contains("at most 166912 bytes on sm_80"));
}

#[test]
fn what_is_not_implemented_is_named_and_nothing_runs() {
    let kernel = kernel("tcgen05.shift.cta_group::1.down [%r0];");
    let error = launch(&kernel, &Options::default()).expect_err("a refusal");
    let expected = "`tcgen05.shift.cta_group::1.down`";
    assert!(matches!(&error, EmuError::Unsupported { line: 12, what } if what == expected), "{error}");
}

#[test]
fn the_machine_keeps_the_report_of_a_launch_with_findings() {
    let kernel = kernel("ld.param.u64 %rd0, [out];\nst.global.u32 [%rd0+4096], 1;");
    let mut machine = Emulator::new(Options::default());
    let mut buffer = machine.allocate(4096).unwrap();
    assert!(machine.upload(&mut buffer, &[0; 4097]).is_err());
    machine.upload(&mut buffer, &[0; 4096]).unwrap();
    let error = machine.launch(&kernel, &mut [&mut buffer]).expect_err("a finding");
    assert!(error.to_string().contains("out_of_bounds at line 13"), "{error}");
    assert_eq!(machine.last_report().map(|r| r.hazards.len()), Some(1));
}

#[test]
fn accesses_and_lanes_are_counted_by_line() {
    let kernel = kernel(
        "mov.u32 %r0, %tid.x;
         mov.u32 %r1, smem;
         shl.b32 %r2, %r0, 5;
         add.u32 %r2, %r1, %r2;
         st.shared.u32 [%r2], %r0;
         shl.b32 %r3, %r0, 2;
         ld.param.u64 %rd0, [out];
         cvt.u64.u32 %rd1, %r3;
         add.u64 %rd1, %rd0, %rd1;
         st.global.u32 [%rd1], %r0;
         setp.ne.u32 %p0, %r0, 0;
         @%p0 bra DONE;
         ex2.approx.f32 %f0, 0f3F800000;
         fma.rn.f32 %f1, %f0, %f0, %f0;
         DONE:
         bar.sync 0;",
    );
    let options = Options { traced_ctas: vec![0], ..Options::default() };
    let report = launch(&kernel, &options).expect("a run");
    assert!(report.hazards.is_empty(), "{}", report.hazards[0]);
    let at = |line: u32| *report.counters.instructions.iter().find(|c| c.line == line).expect("a line");
    // 32 bytes apart: 8 lanes per bank.
    let shared = at(16);
    assert_eq!((shared.issues, shared.lanes, shared.shared_passes, shared.shared_ideal), (2, 64, 16, 2));
    assert_eq!(shared.conflict_degree(), 8.0);
    let global = at(21);
    assert_eq!((global.global_accesses, global.global_sectors, global.global_bytes), (2, 8, 256));
    assert_eq!((at(24).lanes, at(24).special), (1, 1));
    assert_eq!((at(25).issues, at(25).flop), (1, 2));
    assert_eq!(report.counters.barriers, 2);
    // Only warp 0 runs the two lines after the branch, with one lane.
    assert_eq!((report.counters.single_lane_issues, report.counters.lone_warp_issues), (2, 2));
    let trace = &report.traces[0];
    assert_eq!((trace.cta, trace.issues()), (0, report.steps));
    let issues: u64 = report.counters.instructions.iter().map(|c| c.issues).sum();
    assert_eq!(issues, report.steps);
}

/// Only the named ranges must be written.
#[test]
fn rows_that_must_be_written_can_be_named() {
    let mut kernel = kernel("ld.param.u64 %rd0, [out];\nst.global.u32 [%rd0], 1;");
    kernel.buffers[0].access = Access::Write;
    kernel.launch.block = Dim3(32, 1, 1);
    let mut options = Options::default();
    let missing = launch(&kernel, &options).expect("a run").hazards;
    assert_eq!(missing.len(), 1);
    assert!(missing[0].to_string().contains("4092 bytes of the output were never written"), "{}", missing[0]);
    options.must_write.insert(0, std::iter::once(0..4).collect());
    assert!(launch(&kernel, &options).expect("a run").hazards.is_empty());
}

#[test]
fn dynamic_shared_memory_that_the_launch_does_not_give_is_named() {
    let mut kernel = kernel("");
    let text = ".version 7.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 rows[];\n\
                .visible .entry k(.param .u64 out)\n{\n.reg .b32 %r;\nmov.u32 %r, rows;\n\
                st.shared.u32 [%r+64], %r;\nret;\n}\n";
    kernel.module = ptx::parse(text).unwrap().assume_verified();
    let said = |kernel: &Kernel| launch(kernel, &Options::default()).unwrap().hazards[0].message.clone();
    assert!(said(&kernel).contains("of which the launch gives 0 bytes"), "{}", said(&kernel));
    kernel.launch.dynamic_shared = 64;
    assert!(said(&kernel).contains("of which the launch gives 64 bytes"), "{}", said(&kernel));
    kernel.launch.dynamic_shared = 128;
    assert!(launch(&kernel, &Options::default()).unwrap().hazards.is_empty());
}

#[test]
fn a_trap_for_want_of_a_grid_workspace_is_named() {
    let kernel = kernel(
        "mov.b32 %r0, %envreg1;\nmov.b32 %r1, %envreg2;\nor.b32 %r0, %r0, %r1;\nsetp.eq.u32 %p0, %r0, 0;\n@%p0 trap;",
    );
    let report = launch(&kernel, &Options::default()).unwrap();
    assert!(report.hazards[0].message.contains("the launch is not cooperative"), "{:?}", report.hazards);
    let cooperative = Options { cooperative: true, ..Options::default() };
    assert!(launch(&kernel, &cooperative).unwrap().hazards.is_empty());
}

#[test]
fn registers_that_no_gpu_has_are_refused() {
    let with = |registers: u32, threads: u32| {
        let mut kernel = kernel("");
        let text = format!(
            ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out)\n\
             .maxnreg {registers}\n{{\nsetmaxnreg.dec.sync.aligned.u32 24;\nret;\n}}\n"
        );
        kernel.module = ptx::parse(&text).unwrap().assume_verified();
        kernel.launch.block = Dim3(threads, 1, 1);
        launch(&kernel, &Options::default())
    };
    assert!(with(168, 384).is_ok());
    let refused = with(168, 512).unwrap_err().to_string();
    assert!(refused.contains("168 for each thread of 16 warps"), "{refused}");
}
