"""What a job is (spec, shapes, layout, catalogue), and the clusters that it runs on."""
