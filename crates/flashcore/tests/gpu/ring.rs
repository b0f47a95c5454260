//! A ring over shards in device memory. Ranks are threads.

use std::thread;
use std::time::Duration;

use driver::{Buffer, Communicator, GroupId, Stream, bytes_of};
use flashcore::gpu::Gpu;
use flashcore::parallel::{DeviceRing, DeviceShards, SequenceSplit};
use flashcore::{AttentionError, Band, DType, Layout, Problem};
use half::f16;

const HEADS: [usize; 2] = [4, 2];

fn problem(length: usize, dim: usize, band: Band) -> Problem {
    let problem = Problem { heads_kv: HEADS[1], ..Problem::new(1, HEADS[0], length, dim, DType::F16) };
    problem.with_layout(Layout::Bshd).with_band(band)
}

fn numbers(count: usize, step: usize) -> Vec<f16> {
    (0..count).map(|i| f16::from_f32(((i * step) % 17) as f32 / 8.0 - 1.0)).collect()
}

/// O as `[head, row, dim]` and the LSE of documents that see themselves alone.
fn expected(documents: &[usize], dim: usize, band: Band, [q, k, v]: [&[f16]; 3]) -> (Vec<f64>, Vec<f64>) {
    let length = documents[documents.len() - 1];
    let (mut out, mut lse) = (vec![0.0; HEADS[0] * length * dim], vec![0.0; HEADS[0] * length]);
    for ends in documents.windows(2) {
        let rows = ends[1] - ends[0];
        let part = |x: &'static usize, of: &[f16]| of[ends[0] * x * dim..ends[1] * x * dim].to_vec();
        let found = oracle::oracle(
            &problem(rows, dim, band),
            &part(&HEADS[0], q)[..],
            &part(&HEADS[1], k)[..],
            &part(&HEADS[1], v)[..],
        )
        .unwrap();
        for head in 0..HEADS[0] {
            let (to, from) = (head * length + ends[0], head * rows);
            out[to * dim..][..rows * dim].copy_from_slice(&found.out[from * dim..][..rows * dim]);
            lse[to..][..rows].copy_from_slice(&found.lse[from..][..rows]);
        }
    }
    (out, lse)
}

fn upload(gpu: &Gpu, values: &[f16]) -> Buffer {
    let mut buffer = Buffer::new(gpu.context(), size_of_val(values)).unwrap();
    buffer.upload(bytes_of(values)).unwrap();
    buffer
}

/// Computes a sequence on as many ranks as the split has. `ordinal` gives the GPU of a rank.
pub fn compute(split: &SequenceSplit, dim: usize, band: Band, ordinal: fn(usize) -> i32) {
    let (length, ranks, documents) = (split.length(), split.ranks(), split.documents());
    let counts = [HEADS[0], HEADS[1], HEADS[1]].map(|heads| length * heads * dim);
    let [q, k, v] = [(counts[0], 3), (counts[1], 5), (counts[2], 11)].map(|(n, step)| numbers(n, step));
    let (out, lse) = expected(documents, dim, band, [&q, &k, &v]);
    let (whole, id) = (problem(length, dim, band), GroupId::new().unwrap());
    let rank = |rank: usize| {
        let gpu = Gpu::open(ordinal(rank)).unwrap();
        let group = Communicator::join(gpu.context(), &id, rank, ranks, Duration::from_secs(120)).unwrap();
        let stream = Stream::new(gpu.context()).unwrap();
        let ring = DeviceRing::new(&gpu, &whole, split, rank).unwrap();
        let shard = |x: &[f16], heads: usize| split.shard(x, rank, [1, heads * dim]).unwrap();
        let [q, k, v] =
            [(&q, HEADS[0]), (&k, HEADS[1]), (&v, HEADS[1])].map(|(x, heads)| upload(&gpu, &shard(x, heads)));
        let rows = split.rows();
        let of_out = upload(&gpu, &vec![f16::NAN; rows * HEADS[0] * dim]);
        let of_lse = Buffer::new(gpu.context(), 4 * rows * HEADS[0]).unwrap();
        let shards = DeviceShards {
            q: q.slice(),
            k: k.slice(),
            v: v.slice(),
            out: of_out.slice(),
            lse: of_lse.slice(),
        };
        for _ in 0..2 {
            ring.run(&group, &stream, shards).unwrap(); // the second call uses all memory again
        }
        group.wait(&stream).unwrap();
        let mut bytes = vec![0; of_out.bytes()];
        of_out.download(&mut bytes).unwrap();
        let found: Vec<f64> = bytes.as_chunks().0.iter().map(|x| f16::from_ne_bytes(*x).to_f64()).collect();
        let mut bytes = vec![0; of_lse.bytes()];
        of_lse.download(&mut bytes).unwrap();
        let found_lse: Vec<f64> = bytes.as_chunks().0.iter().map(|x| f32::from_ne_bytes(*x).into()).collect();
        let out = split.shard(&out, rank, [HEADS[0], dim]).unwrap();
        let lse = split.shard(&lse, rank, [HEADS[0], 1]).unwrap();
        for (head, row) in (0..HEADS[0]).flat_map(|head| (0..rows).map(move |row| (head, row))) {
            let place = head * rows + row;
            let pads = row >= split.used(rank);
            let want = if pads { f64::NEG_INFINITY } else { lse[place] };
            let near = found_lse[place] == want || (found_lse[place] - want).abs() < 1e-4;
            assert!(near, "rank {rank}, head {head}, row {row}: {} {want}", found_lse[place]);
            for d in 0..dim {
                let (x, want) = (found[(row * HEADS[0] + head) * dim + d], out[place * dim + d]);
                assert!((x - want).abs() < 4e-3, "rank {rank}, head {head}, row {row}: {x} {want}");
            }
        }
        let fewer = DeviceShards { lse: of_lse.slice().part(0, 4).unwrap(), ..shards };
        let told = ring.run(&group, &stream, fewer).unwrap_err().to_string();
        assert!(told.contains("invalid value '4' for the number of bytes of lse"), "{told}");
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Every split, with bands and padded shards, and a problem that a ring refuses.
pub fn ring() {
    let documents = [0, 40, 51, 97];
    for (split, band) in [
        (SequenceSplit::zigzag(&[0, 97], 2), Band::CAUSAL),
        (SequenceSplit::contiguous(&[0, 60], 3), Band::window(20, 0)),
        (SequenceSplit::by_documents(&documents, 2), Band::CAUSAL),
        (SequenceSplit::contiguous(&documents, 2), Band::FULL),
    ] {
        compute(&split.unwrap(), 16, band, |_| 0);
    }
    let (gpu, split) = (Gpu::open(0).unwrap(), SequenceSplit::zigzag(&[0, 64], 2).unwrap());
    let refused = |whole: &Problem, rank: usize| -> String {
        let told: Result<DeviceRing, AttentionError> = DeviceRing::new(&gpu, whole, &split, rank);
        told.unwrap_err().to_string()
    };
    let mut whole = problem(64, 16, Band::CAUSAL);
    assert!(
        refused(&whole, 2).contains("invalid value '2' for the number of rank: expected a number below 2")
    );
    assert!(refused(&problem(63, 16, Band::CAUSAL), 0).contains("[1, 64, 64], the rows of the split"));
    whole.score.sink = true;
    assert!(refused(&whole, 0).contains("a band, a scale and a softcap alone"));
}
