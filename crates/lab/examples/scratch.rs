//! scratch
use emu::model::{CacheState, Gpu, Subject, predict};
use emu::{Buffer, Options, Schedule, run};
use kernels::Arch;
use problem::Problem;
fn rnd(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed;
    (0..n)
        .map(|_| {
            let mut t = 0f64;
            for _ in 0..12 {
                s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                t += (s >> 11) as f64 / (1u64 << 53) as f64;
            }
            (t - 6.0) as f32
        })
        .collect()
}
fn main() {
    let p = Problem::mission();
    let n = 8 * 512 * 64;
    let x: Vec<Vec<f32>> = (1..4).map(|s| rnd(n, s * 77)).collect();
    let ptxas = emu::resources::Ptxas::find();
    let mut ks: Vec<(ptx::Kernel, bool)> =
        kernels::ladder::dump(&p, &Arch::SM_89).into_iter().map(|k| (k, true)).collect();
    let plan = kernels::Plan::default_for(&p, &Arch::SM_89).unwrap();
    ks.push((kernels::emit(&p, &plan, &Arch::SM_89).unwrap(), false));
    for (mut k, u8k) in ks {
        k.module.number_lines();
        let mut bufs: Vec<Buffer> = vec![];
        let mut judged: Vec<Vec<half::f16>> = vec![];
        if u8k {
            let mut sc = vec![];
            for t in &x {
                let q = kernels::ladder::u8_common::quantise(t, 512 * 64);
                bufs.push(Buffer::from_bytes(&q.codes));
                for s in &q.scales {
                    sc.extend(s.to_le_bytes());
                }
                judged.push(
                    kernels::ladder::u8_common::dequantise(&q).into_iter().map(half::f16::from_f32).collect(),
                );
            }
            bufs.push(Buffer::uninitialised(2 * n));
            bufs.push(Buffer::from_bytes(&sc));
        } else {
            for t in &x {
                let h: Vec<half::f16> = t.iter().map(|v| half::f16::from_f32(*v)).collect();
                bufs.push(Buffer::from_bytes(
                    &h.iter().flat_map(|v| v.to_bits().to_le_bytes()).collect::<Vec<_>>(),
                ));
                judged.push(h);
            }
            bufs.push(Buffer::uninitialised(2 * n));
        }
        let want = cpu::oracle(&p, &judged[0], &judged[1], &judged[2]).unwrap();
        for schedule in [Schedule::Late, Schedule::Random] {
            let t = std::time::Instant::now();
            let grid = k.launch.grid.count();
            let o = Options {
                schedule,
                seed: 3,
                traced_ctas: emu::trace::sample_ctas(grid, 4),
                ..Options::default()
            };
            let mut refs: Vec<&mut Buffer> = bufs.iter_mut().collect();
            let r = match run(&k, &mut refs, &o) {
                Ok(r) => r,
                Err(e) => {
                    println!("{} ERR {e}", k.entry);
                    continue;
                }
            };
            let secs = t.elapsed().as_secs_f64();
            let out = bufs[3].to_bytes();
            let diff = out
                .chunks(2)
                .zip(&want.out)
                .map(|(b, w)| {
                    (f64::from(half::f16::from_bits(u16::from_le_bytes([b[0], b[1]])).to_f32()) - w).abs()
                })
                .fold(0f64, |a, b| if b.is_nan() { f64::NAN } else { a.max(b) });
            println!(
                "{} {schedule:?}: {secs:.2}s steps {} ({:.0} M thread-instr/s) max_diff {diff:.5} hazards {}",
                k.entry,
                r.steps,
                r.steps as f64 * 32.0 / secs / 1e6,
                r.hazards.len()
            );
            for h in r.hazards.iter().take(2) {
                println!(
                    "   {} line {} other {:?} {:?}: {}",
                    h.kind.name(),
                    h.line,
                    h.other_line,
                    h.place.as_ref().map(|p| p.to_string()),
                    h.message
                );
            }
            if schedule == Schedule::Late {
                for g in ["L4", "H200"] {
                    let gpu = Gpu::named(g).unwrap();
                    let arch = if g == "L4" { "sm_89" } else { "sm_90" };
                    let res = ptxas
                        .as_ref()
                        .ok()
                        .and_then(|p| p.resources(&k.module.to_string(), arch, &k.entry).ok())
                        .or_else(|| emu::resources::estimate(&k.module, &k.entry))
                        .unwrap();
                    let t = std::time::Instant::now();
                    let pr = predict(
                        &Subject {
                            module: &k.module,
                            launch: &k.launch,
                            traces: &r.traces,
                            resources: &res,
                            footprint: 4 * 2 * n as u64,
                            cache: CacheState::Warm,
                        },
                        gpu,
                    )
                    .unwrap();
                    println!(
                        "   {g}: {:.1} us [{:.1}, {:.1}] bound {:?} regs {} split {:?} waves {} ({:.1}s)",
                        pr.us,
                        pr.us_low,
                        pr.us_high,
                        pr.bound,
                        res.registers,
                        pr.split.iter().take(4).map(|(c, s)| format!("{c:?} {:.2}", s)).collect::<Vec<_>>(),
                        pr.waves,
                        t.elapsed().as_secs_f64()
                    );
                }
            }
        }
    }
}
