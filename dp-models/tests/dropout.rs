use candle_core::{DType, Device, Tensor, Var};
use candle_nn::ModuleT;
use dp_models::Dropout;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn masks(p: f64, seed: u64, len: usize) -> Vec<f32> {
    let ones = Tensor::ones(len, DType::F32, &Device::Cpu).unwrap();
    let dropout = Dropout::new(p, seed).unwrap();
    let y = dropout.forward_t(&ones, true).unwrap();
    y.to_vec1().unwrap()
}

#[test]
fn it_drops_at_its_rate_and_keeps_the_mean() {
    for p in [0.1, 0.5, 0.9] {
        let y = masks(p, 3, 20_000);
        let dropped = y.iter().filter(|y| **y == 0.).count() as f64 / 20_000.;
        // Four standard deviations of a binomial count.
        assert!(
            (dropped - p).abs() < 4. * (p * (1. - p) / 20_000.).sqrt(),
            "{p}: {dropped}"
        );
        assert!(
            y.iter()
                .all(|y| *y == 0. || (f64::from(*y) - 1. / (1. - p)).abs() < 1e-6)
        );
    }
}

#[test]
fn masks_follow_from_the_seed_and_go_on() {
    assert_eq!(masks(0.5, 7, 1000), masks(0.5, 7, 1000));
    let agree = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a == b).count();
    let same = agree(&masks(0.5, 7, 1000), &masks(0.5, 8, 1000));
    assert!((400..600).contains(&same), "{same} of 1000");

    let ones = Tensor::ones(1000, DType::F32, &Device::Cpu).unwrap();
    let dropout = Dropout::new(0.5, 7).unwrap();
    let draw = || {
        dropout
            .forward_t(&ones, true)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    };
    let (first, second) = (draw(), draw());
    assert_ne!(first, second);
}

#[test]
fn the_gradient_passes_where_the_value_does() {
    let x = Var::ones(50, DType::F32, &Device::Cpu).unwrap();
    let y = Dropout::new(0.5, 1).unwrap().forward_t(&x, true).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    let grad = grads.get(&x).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(grad, y.to_vec1::<f32>().unwrap());
}

#[test]
fn evaluation_and_p_0_change_nothing_and_16_bit_stays_16_bit() {
    let x = Tensor::new(&[1f32, -2.], &Device::Cpu).unwrap();
    for (p, train) in [(0.5, false), (0., true)] {
        let y = Dropout::new(p, 0).unwrap().forward_t(&x, train).unwrap();
        assert_eq!(y.to_vec1::<f32>().unwrap(), [1., -2.]);
    }
    let half = x.to_dtype(DType::BF16).unwrap();
    let y = Dropout::new(0.5, 0)
        .unwrap()
        .forward_t(&half, true)
        .unwrap();
    assert_eq!(y.dtype(), DType::BF16);
}

#[test]
fn impossible_rates_are_refused() {
    for p in [1., -0.1, f64::NAN] {
        let error = Dropout::new(p, 0).unwrap_err().to_string();
        assert!(error.contains("Dropout: p"), "{error}");
    }
}

/// The result is the product with a mask of factors that are drawn one by one, zero's sign, infinity and NaN included; over
/// the ends of words of the mask, and of chunks.
#[test]
fn it_is_the_product_with_a_drawn_mask() {
    for (p, len) in [(0.3, 1), (0.5, 31), (0.1, 33), (0.7, 40_001)] {
        let mut rng = ChaCha8Rng::seed_from_u64(11);
        let (keep, mut x) = (1. - p, Vec::new());
        let mask: Vec<f32> = (0..len)
            .map(|i| {
                x.push((i as f32 - 7.) / 8.);
                let kept = rng.random_bool(keep);
                if kept { (1. / keep) as f32 } else { 0. }
            })
            .collect();
        x[len / 2] = f32::INFINITY;
        x[len - 1] = f32::NEG_INFINITY;
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let x = Tensor::new(&x[..], &Device::Cpu).unwrap();
            let x = Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
            let dropout = Dropout::new(p, 11).unwrap();
            let y = dropout.forward_t(&x, true).unwrap();
            assert_eq!(dropout.position(), 2 * len as u64);

            let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
            let bits = |t: &Tensor| -> Vec<u32> {
                let values = wide(&t.to_dtype(dtype).unwrap()).to_vec1::<f32>().unwrap();
                // One NaN is as good as another.
                let canonical = |v: f32| if v.is_nan() { f32::NAN } else { v };
                values.into_iter().map(|v| canonical(v).to_bits()).collect()
            };
            let mask = Tensor::new(&mask[..], &Device::Cpu).unwrap();
            let want = (wide(&x) * &mask).unwrap();
            assert_eq!(bits(&y), bits(&want), "{dtype:?} of {len}");

            // The second time from the same mask as the first.
            let loss = y.sum_all().unwrap();
            for _ in 0..2 {
                let grads = loss.backward().unwrap();
                assert_eq!(
                    bits(grads.get(&x).unwrap()),
                    bits(&mask),
                    "{dtype:?} of {len}"
                );
            }
        }
    }
}

#[test]
fn a_position_is_sought_and_views_are_dropped_in_their_own_order() {
    let x = Tensor::arange(0f32, 35., &Device::Cpu).unwrap();
    let dropout = Dropout::new(0.4, 3).unwrap();
    let draw = |x: &Tensor| {
        let y = dropout.forward_t(x, true).unwrap();
        y.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    draw(&x);
    let position = dropout.position();
    let second = draw(&x);
    dropout.seek(position);
    assert_eq!(draw(&x), second);

    let view = x.reshape((5, 7)).unwrap().t().unwrap();
    dropout.seek(position);
    let of_view = draw(&view);
    dropout.seek(position);
    assert_eq!(of_view, draw(&view.contiguous().unwrap()));

    dropout.seek(position);
    assert!(draw(&x.narrow(0, 0, 0).unwrap()).is_empty());
    assert_eq!(dropout.position(), position);
    assert_eq!(draw(&Tensor::new(0f32, &Device::Cpu).unwrap()), [0.]);
}
