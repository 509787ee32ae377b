"""What any multi-device inference needs: device, process group, logs, reports. It knows no model."""
