use emu::model::{CacheState, Gpu, Subject, predict};
use emu::{Buffer, Checks, Options};
use flashcore_kernels::ladder::rungs;
use flashcore_kernels::{Arch, Plan, emit};
use problem::Problem;
fn main() {
    let only: Vec<String> = std::env::args().skip(1).collect();
    let gpu = Gpu::named("L4").or_else(|| Gpu::named("l4")).unwrap();
    let ptxas =
        emu::resources::Ptxas::at(std::path::Path::new(&std::env::var("FLASHCORE_PTXAS").unwrap())).unwrap();
    for rung in rungs() {
        if !only.is_empty() && !only.iter().any(|o| o == rung.name) {
            continue;
        }
        let problem = Problem::mission().with_mask(rung.mask);
        let kernel = emit(&problem, &Plan::Ladder { rung: rung.plan }, &Arch::SM_89).unwrap();
        let mut buffers: Vec<Buffer> =
            kernel.buffers.iter().map(|b| Buffer::from_bytes(&vec![0x20u8; b.bytes])).collect();
        let ctas = kernel.launch.grid.count();
        // Only the first head is run: the others are alike.
        let mut small = kernel.clone();
        small.launch.grid.1 = 1;
        let traced: Vec<u64> =
            (0..small.launch.grid.count()).step_by((small.launch.grid.count() as usize / 4).max(1)).collect();
        let options = Options {
            checks: Checks { races: false, uninitialised: false, unwritten: false },
            traced_ctas: traced,
            ..Options::default()
        };
        let t = std::time::Instant::now();
        let report = emu::run(&small, &mut buffers.iter_mut().collect::<Vec<_>>(), &options).unwrap();
        let t1 = t.elapsed();
        let res = ptxas.resources(&kernel.module.to_string(), "sm_89", &kernel.entry).unwrap();
        let s = Subject {
            module: &kernel.module,
            launch: &kernel.launch,
            traces: &report.traces,
            resources: &res,
            footprint: 4 * 524288,
            cache: CacheState::Warm,
        };
        let p = predict(&s, gpu).unwrap();
        let mut split = p.split.clone();
        split.sort_by(|a, b| b.1.total_cmp(&a.1));
        println!(
            "{:14} ctas {ctas} pred {:8.1} us quoted {:?} bound {:?} occ {} regs {} | {:?} | sh {:.2} l1 {:.2} issue {:.2} | emu {:.1?} {:.1?}",
            rung.name,
            p.us,
            rung.quoted_us,
            p.bound,
            p.occupancy.ctas,
            res.registers,
            split.iter().take(4).map(|(c, x)| format!("{} {:.2}", c.name(), x)).collect::<Vec<_>>(),
            p.utilisation.shared,
            p.utilisation.l1,
            p.utilisation.issue,
            t1,
            t.elapsed()
        );
    }
}
